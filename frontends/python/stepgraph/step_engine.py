"""Between torch's groups and states, which the user may change at will, and the executor, which
knows the memory and options that it was built for.

A steady step finds out that nothing changed: by identity of groups and parameters, by what the live
dictionaries reported, and by `TensorWatch` for memory that moved. Only then it launches.
"""

from __future__ import annotations

import atexit
import weakref
from collections.abc import Iterable, Sequence
from itertools import chain
from operator import is_
from typing import Any

import torch

from ._core import StepBuilder, TensorWatch, UsageError
from .bound_step import BoundParameter
from .live_group import LiveGroup
from .runners import is_capturing
from .step_building import StepBuilding
from .tensors import check_gradient, scaling_addresses, scaling_addresses_of

_engines: weakref.WeakSet[StepEngine] = weakref.WeakSet()


@atexit.register
def _release_all() -> None:
    """Before CUDA goes: an executor that outlives it would wait for a device that is not there."""
    for engine in list(_engines):
        engine.release_at_exit()


class StepEngine(StepBuilding):
    """Runs the steps of one optimizer. Not thread-safe, as optimizers are."""

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
        self._missing_step_keys = True
        self._warned = False
        _engines.add(self)

    # Steps.

    def step(self, optimizer: Any, inputs: tuple[Any, Any] | None = None) -> None:
        """One step on the current stream; never waits in the steady state. `inputs`: found_inf and
        scale of a GradScaler, tensors or numbers."""
        runner = self.runner
        if runner is not None:
            runner.check_launch()
        self.prepare(optimizer, False)
        runner = self.runner
        assert runner is not None
        if inputs is not None:
            self.write_inputs(*inputs)
        elif not self.inputs_neutral:
            self.reset_inputs()
        runner.launch(self.pending)
        self.pending = self.undelivered = False
        self.undelivered_loss_scale = None
        if runner.captured and inputs is not None and not is_capturing(self.index):
            # Replays of a step that was captured without a scaler read the inputs too.
            self.reset_inputs()
        self.steps_stale = True
        if self._missing_step_keys:
            self._add_step_keys()
        self._note_writes()

    def prepare(self, optimizer: Any, ahead: bool = True) -> None:
        """Brings the executor up to date without a step. `ahead`: gradients that do not exist yet
        are expected to come, in the parameter's type."""
        if (
            self.structure_changed
            or self.changes.pending
            or self.runner is None
            or not self._same_objects(optimizer)
        ):
            self.settle(optimizer, ahead)
        if self.watched_groups:
            self.compare_watched()
        if self.changed_groups:
            self.send_values()
        if self._state_watch is not None and self._state_watch.changed():
            self.force_build = True
            self.settle(optimizer, ahead)
        moved = self._watch.changed()
        if moved or self._placeholders or self._unwatched:
            self._follow_memory(optimizer, moved, ahead)

    def _same_objects(self, optimizer: Any) -> bool:
        groups = optimizer.param_groups
        return (
            optimizer.state is self.state_map
            and len(groups) == len(self._group_list)
            and all(map(is_, groups, self._group_list))
            and sum(map(len, self._param_lists)) == self._param_count
            and all(map(is_, chain.from_iterable(self._param_lists), self._params))
        )

    def _add_step_keys(self) -> None:
        self.stepped = True
        self._missing_step_keys = False
        for bound in self.groups:
            if "step" not in bound.group:
                bound.group.store("step", 0)

    def _note_writes(self) -> None:
        """Autograd then notices a backward through values that the step has overwritten; caches of
        FP8 tensors and quantized parameters follow their new values."""
        if self._bumped:
            torch._C._increment_version(self._bumped)
        if self.options.writes_gradients:
            gradients = [each.current_gradient() for each in self.parameters if each.tensor_id >= 0]
            torch._C._increment_version([g for g in gradients if g is not None])
        for each in self._after_step:
            _follow_values(each)

    # Changes between steps.

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
            self._add_step_keys()

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
        self._watch.accept()
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

    def _moved_state(self) -> str:
        moved = set(self._state_watch.changed())
        at = 0
        for each in self.parameters:
            if moved & set(range(at, at + len(each.tensors))):
                return f"{each.label}: a state"
            at += len(each.tensors)
        return "a tensor that holds lr, weight_decay or FP8 scaling"

    def _follow_memory(self, optimizer: Any, moved: Iterable[int], ahead: bool) -> None:
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
        for i in sorted(candidates):
            self._follow_parameter(i, bindings, replan, ahead)
        if replan:
            self._replan(optimizer, replan, ahead)
        elif bindings:
            assert self.runner is not None
            self.runner.executor.rebind(bindings)
            self.rebinds += len(bindings)
            self.pending = True
            by_id = {each.tensor_id: each for each in self.parameters}
            for tensor_id, operand_name, address, _ in bindings:
                setattr(by_id[tensor_id], f"{operand_name}_address", address)
        self._placeholders = ahead and self.expects_gradients
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
        if moved:
            self._refuse_if_captured(each, "parameter")
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
        if local is not None and local.data_ptr() != each.gradient_address:
            self._refuse_if_captured(each, "gradient")
            bindings.append((each.tensor_id, "gradient", local.data_ptr(), 0))

    def _refuse_if_captured(self, each: BoundParameter, operand_name: str) -> None:
        if self.captured:
            raise UsageError(
                f"{each.label}: the {operand_name} moved to other memory after the step was "
                "captured; replays would go on using the old one. Keep it in place "
                "(zero_grad(set_to_none=False)), or call abandon_captured_steps() when the "
                "captured graphs are gone"
            )

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
                f"{labels}{more}: a gradient or parameter came, went or changed its type since the "
                "step was built; call prepare() or step once before the capture, with all gradients "
                "of the captured step"
            )
        warn = self.stepped and not self._warned and not self._placeholders
        self.force_build = True
        self.settle(optimizer, ahead)
        if warn:
            self._warned = True
            self.warn_of_rebuild(f"{labels}{more}")

    # Options of the whole step.

    def set_norm_option(self, key: str, value: float) -> None:
        """`max_norm` or `skip_above_norm`."""
        core_key = {"max_norm": "max_grad_norm"}.get(key, key)
        option: dict[str, Any] = {core_key: value}
        StepBuilder().set_options(**option)
        if self.runner is not None and self.measures:
            getattr(self.runner.executor, f"set_{core_key}")(value)
            self.pending = True
            if self.captured:
                self.deliver_now()
        elif self.runner is not None and value > 0.0:
            if self.captured:
                raise UsageError(
                    f"{key}: the captured step does not measure the gradients; call "
                    "abandon_captured_steps() when the captured graphs are gone"
                )
            self.force_build = self.structure_changed = True
        setattr(self.options, key, value)

    def resume_schedule(self, group: LiveGroup, decay: bool) -> None:
        """Gives a value that is held by hand back to the schedule."""
        key = "weight_decay_schedule" if decay else "schedule"
        if group.stored(key) is None:
            raise UsageError(f"{group.name}: has no {key} to resume")
        index = self.index_of(group)
        if self.runner is None or index is None or self.structure_changed:
            return
        bound = self.groups[index]
        if decay:
            self.runner.executor.resume_weight_decay_schedule(index)
            bound.weight_decay_held = False
        else:
            self.runner.executor.resume_schedule(index)
            bound.lr_held = False
        self.pending = True
        if self.captured:
            self.deliver_now()

    # Captures, delivery, the end.

    def deliver(self, optimizer: Any) -> None:
        """Delivers values that were set, without a step."""
        if self.runner is None:
            return
        if self.structure_changed or self.changes.pending or not self._same_objects(optimizer):
            self.settle(optimizer)
        if self.watched_groups:
            self.compare_watched()
        self.send_values()
        self.deliver_now()

    def abandon_captured_steps(self) -> None:
        """The caller's graphs that recorded a step are gone."""
        if self.runner is not None and self.runner.captured:
            self.runner.captured = False

    def recapture_required(self) -> str | None:
        """Why replays of a captured step would be wrong, or None."""
        if self.runner is None:
            return None
        reason: str | None = self.runner.executor.recapture_required()
        if reason is None and self.captured:
            for i in self._watch.changed():
                return f"{self.parameters[self._watched_ids[i]].label}: moved to other memory"
            if self._state_watch.changed():
                return f"{self._moved_state()} moved to other memory"
        return reason

    def release(self) -> None:
        """Ends the executor; the next step builds another, which goes on where it stood."""
        if self.runner is None:
            return
        self.keep_progress()
        self.runner.release()
        self.drop_runner()

    def drop_runner(self) -> None:
        """Forgets the executor."""
        self.runner = None
        self.pending = False
        self.structure_changed = True

    def release_at_exit(self) -> None:
        """Like release, without reading anything back."""
        runner, self.runner = self.runner, None
        if runner is not None:
            runner.release()


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


def _follow_values(each: BoundParameter) -> None:
    """After a step has been enqueued that wrote the bytes of an FP8 tensor or the master of a
    quantized one."""
    parameter: Any = each.parameter
    if each.view.quantized:
        with torch.no_grad():
            parameter.quantize_(each.state["master_param"])
        return
    if hasattr(parameter, "_transpose_invalid"):
        parameter._transpose_invalid = True
    elif hasattr(parameter, "_reset_caches"):
        parameter._reset_caches()
