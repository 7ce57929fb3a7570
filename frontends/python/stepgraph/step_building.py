"""From torch's groups and states to a plan and its executor."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from ._core import UpdateError, UsageError
from .bound_step import (
    BoundGroup,
    BoundParameter,
    Shape,
    build_plan,
    operands_of,
    shape_of,
)
from .group_values import values_of
from .live_group import LiveGroup, ParameterState, StateMap
from .runners import make_runner
from .scaler_inputs import ScalerInputs
from .tensors import (
    ParameterView,
    check_gradient,
    device_index,
)


class StepBuilding(ScalerInputs):
    """Builds the step anew, or takes the executor to another plan."""

    force_build = False
    """Build even if groups and parameters are the same objects."""
    measures = False
    """The plan reads the gradients before it updates."""
    expects_gradients = False
    """The plan holds gradients that do not exist yet, or that were dropped after a capture."""

    # What differs.

    def structure_differs(self, optimizer: Any, groups: Sequence[LiveGroup]) -> bool:
        """Whether only another plan can follow the groups, parameters and states as they are."""
        if self.runner is None or self.force_build or len(groups) != len(self.groups):
            return True
        if optimizer.state is not self.state_map or self.changes.pending:
            return True
        device = self.device()
        parameters = iter(self.parameters)
        for bound, group in zip(self.groups, groups):
            params = group.stored("params")
            if bound.group is not group:
                return True
            self.bind_inputs(group, device)
            if bound.shape != shape_of(group, self.amsgrad, self.maximize):
                return True
            if any(next(parameters, _no_parameter).parameter is not p for p in params):
                return True
        return next(parameters, None) is not None

    # Building.

    def build(self, optimizer: Any, groups: Sequence[LiveGroup], ahead: bool) -> None:
        """Makes the plan and takes the executor to it. A refusal leaves the step as it was."""
        index = self.device_index_of(groups)
        if self.runner is not None and self.parameters and index != self.index and groups:
            if any(group.stored("params") for group in groups):
                first = self.label_of(next(g for g in groups if g.stored("params")), 0)
                place = "cpu" if index < 0 else f"cuda:{index}"
                raise UsageError(
                    f"{first}: the parameter moved to {place} after a step on {self.device()}; "
                    "load a checkpoint of this optimizer into a new one instead"
                )
            index = self.index
        device = torch.device("cpu") if index < 0 else torch.device("cuda", index)
        state_map = self._adopt_states(optimizer)
        views = self._check_parameters(groups, device)
        for group in groups:
            self.bind_inputs(group, device)
        known = {id(bound.group): bound for bound in self.groups}
        bound_groups = [self._bind_group(group, known.get(id(group))) for group in groups]
        captured = self._captured_parameters()
        keep_alive: list[torch.Tensor] = []
        parameters = []
        expects = False
        for g, group in enumerate(groups):
            for parameter in group.stored("params"):
                label, view = views[id(parameter)]
                each = self._bind_parameter(
                    label, parameter, view, g, bound_groups[g].shape, state_map
                )
                before = captured.get(id(parameter))
                if before is not None:
                    self._check_in_place(each, before)
                    if each.gradient_dtype is None:
                        # Replays go on reading it where it was.
                        _bind_gradient(
                            each, before.gradient_dtype, self.gradient_address_of(before)
                        )
                        expects = True
                elif (
                    each.gradient_dtype is None
                    and ahead
                    and not self.captured
                    and _may_get_gradient(parameter)
                ):
                    placeholder = _placeholder(view)
                    _bind_gradient(each, placeholder.dtype, placeholder.data_ptr())
                    keep_alive.append(placeholder)
                    expects = True
                parameters.append(each)
        self._check_local_options(parameters)
        self.make_inputs(device)
        plan = build_plan(
            bound_groups,
            parameters,
            self.decoupled,
            self.options.core(
                0 if self.found_inf is None else self.found_inf.data_ptr(),
                0 if self.grad_scale is None else self.grad_scale.data_ptr(),
            ),
            index,
        )
        self._take_plan(plan, index)
        del keep_alive
        self._commit(bound_groups, parameters, state_map, expects)

    def _take_plan(self, plan: Any, index: int) -> None:
        if self.runner is not None and index == self.index:
            try:
                report = self.runner.update(plan)
            except UpdateError as error:
                raise UsageError(
                    f"step: the change needs another step than the captured one ({error}); call "
                    "abandon_captured_steps() when the captured graphs are gone"
                ) from None
            self.last_update = report
            self.captures += 1 if report.rebuilt else 0
            self.pending = True
            return
        runner = make_runner(plan, index, self.capturable, self.warmup)
        if self.runner is not None:
            self.keep_progress()
            self.runner.release()
        self.runner = runner
        self.index = index
        self.captures += 1

    def _commit(
        self,
        groups: list[BoundGroup],
        parameters: list[BoundParameter],
        state_map: StateMap,
        expects: bool,
    ) -> None:
        assert self.runner is not None
        before = {id(bound.group) for bound in self.groups}
        self.groups = groups
        self.parameters = parameters
        self.state_map = state_map
        self.force_build = False
        self.expects_gradients = expects
        self.measures = self.options.measures
        self.states.forget_others({id(each.parameter) for each in parameters})
        for index, bound in enumerate(groups):
            bound.group.index = index
            if id(bound.group) not in before:
                # Its name may be that of a group before, whose count the executor kept.
                self.runner.executor.set_group_step(index, bound.group.stored("step", 0))
        self.changed_groups = set(range(len(groups)))
        self.send_values()
        self.watch_values()
        self.hold_again()
        if self.load_pending:
            self.load_progress()

    def _adopt_states(self, optimizer: Any) -> StateMap:
        state = optimizer.state
        if type(state) is not StateMap or state.changes is not self.changes:
            state = StateMap(state, self.changes)
            optimizer.state = state
        for parameter, each in state.items():
            if type(each) is not ParameterState or each.changes is not self.changes:
                state.store(parameter, ParameterState(each, self.changes))
        return state

    def _check_parameters(
        self, groups: Sequence[LiveGroup], device: torch.device
    ) -> dict[int, tuple[str, ParameterView]]:
        views: dict[int, tuple[str, ParameterView]] = {}
        for group in groups:
            for i, parameter in enumerate(group.stored("params")):
                label = self.label_of(group, i)
                if not isinstance(parameter, torch.Tensor):
                    raise UsageError(f"{label}: is a {type(parameter).__name__}, expected a tensor")
                if id(parameter) in views:
                    raise UsageError(
                        f"{label}: the parameter is also {views[id(parameter)][0]}, expected it "
                        "once"
                    )
                view = self.view_of(label, parameter)
                if device_index(view.local.device) != device_index(device):
                    raise UsageError(
                        f"{label}: the parameter is on {view.local.device}, expected {device} as "
                        "the first one; use one optimizer for each device"
                    )
                views[id(parameter)] = (label, view)
        return views

    def _bind_group(self, group: LiveGroup, before: BoundGroup | None) -> BoundGroup:
        shape, values = shape_of(group, self.amsgrad, self.maximize), values_of(group)
        step = group.stored("step", 0)
        if before is None:
            return BoundGroup(group, shape, values, step)
        bound = BoundGroup(group, shape, before.sent, before.plan_step if self.runner else step)
        # A schedule that was just assigned runs, and a value that is sent would hold over it; one
        # that is held by hand stays held.
        schedule, decay_schedule = _schedules(shape)
        schedule_before, decay_schedule_before = _schedules(before.shape)
        if schedule == schedule_before:
            bound.lr_held = before.lr_held
        elif schedule is not None:
            bound.sent = replace(bound.sent, learning_rate=values.learning_rate)
        if decay_schedule == decay_schedule_before:
            bound.weight_decay_held = before.weight_decay_held
        elif decay_schedule is not None:
            bound.sent = replace(bound.sent, weight_decay=values.weight_decay)
        return bound

    def _bind_parameter(
        self,
        label: str,
        parameter: torch.Tensor,
        view: ParameterView,
        group: int,
        shape: Shape,
        state_map: StateMap,
    ) -> BoundParameter:
        attribute = "decoupled_grad" if self.use_decoupled_grad else "grad"
        state = state_map[parameter]

        def before_change(name: str) -> None:
            if self.captured:
                raise UsageError(
                    f"{label}: state {name} must be made or converted, but the step was captured; "
                    "call abandon_captured_steps() when the captured graphs are gone"
                )

        found = getattr(parameter, attribute, None)
        gradient = None if found is None else check_gradient(label, view, found)
        bound = self.states.conform(parameter, view, state, shape[2], label, before_change)
        return BoundParameter(
            label=label,
            parameter=parameter,
            group=group,
            view=view,
            attribute=attribute,
            state=state,
            operands=operands_of(view, bound.operands),
            tensors=bound.tensors,
            layout=(view.local.shape, view.local.stride()),
            gradient_dtype=None if gradient is None else gradient.dtype,
            gradient_address=0 if gradient is None else gradient.data_ptr(),
            parameter_address=0 if view.quantized else view.local.data_ptr(),
        )

    def _captured_parameters(self) -> dict[int, BoundParameter]:
        """The parameters that take part in a captured step, by identity."""
        if not self.captured:
            return {}
        return {id(each.parameter): each for each in self.parameters if each.tensor_id >= 0}

    def _check_in_place(self, each: BoundParameter, before: BoundParameter) -> None:
        """Refuses what captured replays would not follow; what is new needs another plan anyway."""
        if each.parameter_address != before.parameter_address:
            self.refuse_move(each.label, "parameter")
        if each.gradient_dtype is None:
            return
        if each.gradient_address != self.gradient_address_of(before):
            self.refuse_move(each.label, "gradient")
        if each.gradient_dtype is not before.gradient_dtype:
            raise UsageError(
                f"{each.label}: the gradient has type {each.gradient_dtype}, expected "
                f"{before.gradient_dtype} as in the captured step; call abandon_captured_steps() "
                "when the captured graphs are gone"
            )

    def gradient_address_of(self, each: BoundParameter) -> int:
        """Where the next step finds the gradient of a parameter that takes part in it."""
        assert self.runner is not None
        return int(self.runner.executor.address_of(each.tensor_id, "gradient"))

    def refuse_move(self, label: str, operand: str) -> None:
        """An operand of a captured step is elsewhere now."""
        raise UsageError(
            f"{label}: the {operand} moved to other memory after the step was captured; replays "
            "would go on using the old one. Keep it in place (zero_grad(set_to_none=False)), or "
            "call abandon_captured_steps() when the captured graphs are gone"
        )

    def _check_local_options(self, parameters: Sequence[BoundParameter]) -> None:
        """Decisions that need the gradients of all ranks cannot be made here."""
        options = self.options
        asked = [
            key
            for key, wanted in (
                ("max_norm", options.max_norm > 0),
                ("skip_above_norm", options.skip_above_norm > 0),
                ("skip_non_finite", options.skip_non_finite),
                ("loss_scale", options.scaling is not None),
            )
            if wanted
        ]
        if not asked:
            return
        for each in parameters:
            if each.view.distributed and each.parameter.device_mesh.size() > 1:  # type: ignore[attr-defined]
                raise UsageError(
                    f"{each.label}: is a DTensor over several ranks, of which {asked[0]} would see "
                    "one shard; clip with torch.nn.utils.clip_grad_norm_, scale with a GradScaler"
                )

    def warn_of_rebuild(self, labels: str) -> None:
        """Once: rebuilding at every step is slow."""
        reasons = list(getattr(self.last_update, "reasons", ()))[:3]
        warnings.warn(
            f"FusedAdam: the step was built anew because gradients came or went ({labels}). "
            "Parameters without gradient take no part in a step. Where that changes at every step, "
            "leave unused gradients zero instead: a steady set is faster. "
            f"What the update did: {'; '.join(reasons)}",
            stacklevel=2,
        )


class _NoParameter:
    parameter = None


_no_parameter: Any = _NoParameter()


def _schedules(shape: Shape) -> tuple[Any, Any]:
    return shape[3], shape[4]


def _may_get_gradient(parameter: torch.Tensor) -> bool:
    return parameter.requires_grad or not parameter.is_floating_point()


def _bind_gradient(each: BoundParameter, dtype: torch.dtype | None, address: int) -> None:
    """The gradient that the plan gets where the user has stored none."""
    each.gradient_dtype, each.gradient_address = dtype, address


def _placeholder(view: ParameterView) -> torch.Tensor:
    """Memory that stands for a gradient until it exists; nothing reads it."""
    dtype = torch.float32 if view.scaling is not None else view.local.dtype
    return torch.empty_like(view.local, dtype=dtype, requires_grad=False)
