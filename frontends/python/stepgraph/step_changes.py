"""What the user may change between steps: groups, states, and where tensors are."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import chain
from operator import is_
from typing import Any

import torch

from ._core import TensorWatch, UsageError
from .bound_step import BoundParameter
from .live_group import LiveGroup
from .runners import is_capturing
from .step_building import StepBuilding
from .tensors import check_gradient, scaling_addresses, scaling_addresses_of


class StepChanges(StepBuilding):
    """Finds out what changed, and brings the executor up to date or refuses."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._group_list: list[LiveGroup] = []
        self._param_lists: list[list[torch.Tensor]] = []
        self._param_count = 0
        self._params: list[torch.Tensor] = []
        self._watch: Any = None
        self._state_watch: Any = None
        self._watched_ids: list[int] = []
        self._unwatched: list[tuple[int, Any]] = []
        self._bumped: list[torch.Tensor] = []
        self._after_step: list[BoundParameter] = []
        self._placeholders = False
        """Gradients that the plan holds may be missing, which the next step has to look for."""
        self._missing_step_keys = True
        self._warned = False

    def same_objects(self, optimizer: Any) -> bool:
        groups = optimizer.param_groups
        return (
            optimizer.state is self.state_map
            and len(groups) == len(self._group_list)
            and all(map(is_, groups, self._group_list))
            and sum(map(len, self._param_lists)) == self._param_count
            and all(map(is_, chain.from_iterable(self._param_lists), self._params))
        )

    def settle(self, optimizer: Any, ahead: bool = False) -> None:
        """Takes over groups, parameters and states as they are now."""
        with torch.no_grad():
            groups = self.adopt_groups(optimizer)
            changed = self.structure_differs(optimizer, groups)
            if changed:
                self._check_may_build(groups)
                self.build(optimizer, groups, ahead)
                self._remember()
                self._placeholders = self.expects_gradients
                if self.captured:
                    # States alone: replays find them through the step's table.
                    self.deliver_now()
            self._group_list = list(groups)
            self._param_lists = [group.stored("params") for group in groups]
            self.structure_changed = False
            self.changes.pending = False
        if self.stepped:
            self.add_step_keys()

    def add_step_keys(self) -> None:
        self.stepped = True
        self._missing_step_keys = False
        for bound in self.groups:
            if "step" not in bound.group:
                bound.group.store("step", 0)

    def _check_may_build(self, groups: Sequence[LiveGroup]) -> None:
        index = self.index
        if self.runner is None:
            index = self.device_index_of(groups)
        if is_capturing(index):
            what = (
                "the step was not built before the capture"
                if self.runner is None
                else "groups, parameters, states or options changed since the step was built"
            )
            raise UsageError(f"step: {what}; call prepare() or step once before the capture")

    def _remember(self) -> None:
        """What the next steps compare with."""
        parameters = self.parameters
        self._params = [each.parameter for each in parameters]
        self._param_count = len(self._params)
        self._after_step = [e for e in parameters if e.view.float8 or e.view.quantized]
        self._bumped = [p for p in self._params if not p.is_inference()]
        watched = [each for each in parameters if each.view.watchable]
        self._watched_ids = [i for i, each in enumerate(parameters) if each.view.watchable]
        self._unwatched = [
            (i, _place(each)) for i, each in enumerate(parameters) if not each.view.watchable
        ]
        self._watch = TensorWatch(
            [each.parameter for each in watched],
            [each.attribute for each in watched],
            [each.view.distributed for each in watched],
        )
        self._watch.accept([each.tensor_id for each in watched])
        tensors = [tensor for each in parameters for tensor in each.tensors]
        tensors += [
            tensor
            for bound in self.groups
            for tensor in (bound.group.lr_input, bound.group.weight_decay_input)
            if tensor is not None
        ]
        for each in parameters:
            if each.view.scaling is not None:
                scaling = each.view.scaling
                tensors += [scaling.scale, scaling.amax, scaling.scale_inv]
        self._state_watch = TensorWatch(tensors, [""] * len(tensors), [False] * len(tensors))
        self._state_watch.accept()
        self._missing_step_keys = not self.stepped

    def moved_operand(self) -> str | None:
        """Which parameter or gradient is not where a captured step has it, in words. A gradient
        that was dropped did not move."""
        candidates = [self._watched_ids[i] for i in self._watch.changed()]
        candidates += [i for i, place in self._unwatched if _place(self.parameters[i]) != place]
        for i in sorted(candidates):
            try:
                reason = self._why_moved(self.parameters[i])
            except UsageError as error:
                reason = str(error)
            if reason is not None:
                return reason
        return None

    def _why_moved(self, each: BoundParameter) -> str | None:
        now = self.view_of(each.label, each.parameter)
        address = 0 if now.quantized else now.local.data_ptr()
        if (
            address != each.parameter_address
            or (now.local.shape, now.local.stride()) != each.layout
            or now.format != each.view.format
            or scaling_addresses(now) != scaling_addresses(each.view)
        ):
            return f"{each.label}: the parameter moved to other memory"
        gradient = each.current_gradient()
        if gradient is None:
            return None
        local = check_gradient(each.label, now, gradient)
        if each.gradient_dtype is None:
            return f"{each.label}: a gradient came, which the captured step does not read"
        if local.dtype is not each.gradient_dtype:
            return f"{each.label}: the gradient changed its type"
        if local.data_ptr() != self.gradient_address_of(each):
            return f"{each.label}: the gradient moved to other memory"
        return None

    def moved_state(self) -> str:
        moved = set(self._state_watch.changed())
        at = 0
        for each in self.parameters:
            if moved & set(range(at, at + len(each.tensors))):
                return f"{each.label}: a state"
            at += len(each.tensors)
        return "a tensor that holds lr, weight_decay or FP8 scaling"

    def follow_memory(self, optimizer: Any, moved: Iterable[int], ahead: bool) -> None:
        """Parameters or gradients are elsewhere, or came or went."""
        candidates = {self._watched_ids[i] for i in moved}
        if self._placeholders:
            candidates.update(range(len(self.parameters)))
        for i, place in self._unwatched:
            if _place(self.parameters[i]) != place:
                candidates.add(i)
        if not candidates:
            return
        bindings: list[tuple[int, str, int, int]] = []
        replan: list[int] = []
        expects = False
        for i in sorted(candidates):
            self._follow_parameter(i, bindings, replan, ahead)
            each = self.parameters[i]
            expects |= each.gradient_dtype is not None and each.current_gradient() is None
        if replan:
            self._replan(optimizer, replan, ahead)
        elif bindings:
            assert self.runner is not None
            self.runner.executor.rebind(bindings)
            self.rebinds += len(bindings)
            self.pending = True
            by_id = {each.tensor_id: each for each in self.parameters}
            for tensor_id, operand_name, address, _ in bindings:
                if operand_name == "parameter":
                    by_id[tensor_id].parameter_address = address
        self._placeholders = ahead and expects
        self._unwatched = [(i, _place(self.parameters[i])) for i, _ in self._unwatched]
        self._watch.accept()

    def _follow_parameter(
        self,
        i: int,
        bindings: list[tuple[int, str, int, int]],
        replan: list[int],
        ahead: bool,
    ) -> None:
        """Sorts what changed of one parameter: an address to re-bind, or something only another
        plan can follow. Refuses what neither can."""
        each = self.parameters[i]
        now = self.view_of(each.label, each.parameter)
        if now.local.device != self.device():
            raise UsageError(
                f"{each.label}: the parameter moved to {now.local.device} after a step on "
                f"{self.device()}; load a checkpoint of this optimizer into a new one instead"
            )
        shape, stride = each.layout
        if now.local.shape != shape:
            raise UsageError(
                f"{each.label}: the parameter has sizes {tuple(now.local.shape)}, expected "
                f"{tuple(shape)} as at the step before"
            )
        gradient = each.current_gradient()
        local = None if gradient is None else check_gradient(each.label, now, gradient)
        address = 0 if now.quantized else now.local.data_ptr()
        dtype = None if local is None else local.dtype
        if dtype is None and ahead:
            dtype = each.gradient_dtype
        moved = address != each.parameter_address
        if moved and self.captured:
            self.refuse_move(each.label, "parameter")
        if (
            now.format != each.view.format
            or scaling_addresses(now) != scaling_addresses(each.view)
            or dtype is not each.gradient_dtype
            or now.local.stride() != stride
            # Its master is its own memory under another name.
            or (moved and "master_param" in each.state and now.format == "f32")
        ):
            replan.append(i)
            return
        each.view = now
        if moved:
            bindings.append((each.tensor_id, "parameter", address, 0))
        if local is not None and local.data_ptr() != self.gradient_address_of(each):
            if self.captured:
                self.refuse_move(each.label, "gradient")
            bindings.append((each.tensor_id, "gradient", local.data_ptr(), 0))

    def _replan(self, optimizer: Any, changed: Sequence[int], ahead: bool) -> None:
        labels = ", ".join(self.parameters[i].label for i in changed[:3])
        more = f" and {len(changed) - 3} more" if len(changed) > 3 else ""
        if self.captured:
            raise UsageError(
                f"{labels}{more}: a gradient or parameter came, went or changed its type after the "
                "step was captured, and replays would go on with the old step; call "
                "abandon_captured_steps() when the captured graphs are gone"
            )
        if is_capturing(self.index):
            raise UsageError(
                f"{labels}{more}: a gradient or parameter came, went or changed its type since "
                "the step was built; call prepare() or step once before the capture, with all "
                "gradients of the captured step"
            )
        warn = self.stepped and not self._warned and not self._placeholders
        self.force_build = True
        self.settle(optimizer, ahead)
        if warn:
            self._warned = True
            self.warn_of_rebuild(f"{labels}{more}")


def _place(each: BoundParameter) -> Any:
    """Where a parameter that `TensorWatch` cannot read and its gradient are."""
    parameter = each.parameter
    data = getattr(parameter, "_data", None) if each.view.float8 else None
    gradient = each.current_gradient()
    return (
        0 if data is None else data.data_ptr(),
        None if gradient is None else (gradient.data_ptr(), gradient.dtype, gradient.shape),
        scaling_addresses(each.view) if data is None else scaling_addresses_of(parameter),
    )
