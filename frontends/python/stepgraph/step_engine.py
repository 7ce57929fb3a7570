"""Between torch's groups and states, which the user may change at will, and the executor, which
knows the memory and options that it was built for.

A steady step finds out that nothing changed: by identity of groups and parameters, by what the live
dictionaries reported, and by `TensorWatch` for memory that moved. Only then it launches.
"""

from __future__ import annotations

import atexit
import weakref
from typing import Any

import torch

from ._core import StepBuilder, UsageError
from .bound_step import BoundParameter
from .live_group import LiveGroup
from .runners import is_capturing
from .step_changes import StepChanges

_engines: weakref.WeakSet[StepEngine] = weakref.WeakSet()


@atexit.register
def _release_all() -> None:
    """Before CUDA goes: an executor that outlives it would wait for a device that is not there."""
    for engine in list(_engines):
        engine.release_at_exit()


def _bump_one_by_one(tensors: list[torch.Tensor]) -> None:
    for tensor in tensors:
        torch._C._increment_version(tensor)


def _find_bump() -> Any:
    """torch counts versions of a list at once, older ones tensor by tensor."""
    try:
        torch._C._increment_version([torch.empty(0)])
    except TypeError:
        return _bump_one_by_one
    return torch._C._increment_version


bump_versions = _find_bump()


class StepEngine(StepChanges):
    """Runs the steps of one optimizer. Not thread-safe, as optimizers are."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        _engines.add(self)

    # Steps.

    def step(self, optimizer: Any, inputs: tuple[Any, Any] | None = None) -> None:
        """One step on the current stream; never waits in the steady state. `inputs`: found_inf and
        scale of a GradScaler, tensors or numbers."""
        runner = self.runner
        if runner is not None:
            runner.check_launch()
        if inputs is not None and inputs[1] is not None:
            self.expect_scale()
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
            self.add_step_keys()
        self._note_writes()

    def prepare(self, optimizer: Any, ahead: bool = True) -> None:
        """Brings the executor up to date without a step. `ahead`: gradients that do not exist yet
        are expected to come, in the parameter's type; those of a captured step, where they were."""
        if (
            self.structure_changed
            or self.changes.pending
            or self.runner is None
            or not self.same_objects(optimizer)
        ):
            self.settle(optimizer, ahead)
        if self.watched_groups:
            self.compare_watched()
        if self.changed_groups:
            self.send_values()
        if self._state_watch is not None and self._state_watch.changed():
            self.force_build = True
            self.settle(optimizer, ahead)
        moved = self._moved()
        if moved or self._placeholders or self._unwatched:
            self.follow_memory(optimizer, moved, ahead)

    def _moved(self) -> list[int]:
        """Which watched parameters or gradients differ. Gradients that only moved are re-bound on
        the way, unless captured replays may use the old ones."""
        assert self.runner is not None
        if self.runner.captured:
            return self._watch.changed()
        rebound, moved = self.runner.rebind_gradients(self._watch)
        if rebound:
            self.rebinds += rebound
            self.pending = True
        return moved

    def _note_writes(self) -> None:
        """Autograd then notices a backward through values that the step has overwritten; caches of
        FP8 tensors and quantized parameters follow their new values."""
        if self._bumped:
            bump_versions(self._bumped)
        if self.options.writes_gradients:
            gradients = [each.current_gradient() for each in self.parameters if each.tensor_id >= 0]
            bump_versions([g for g in gradients if g is not None])
        for each in self._after_step:
            _follow_values(each)

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
        if self.structure_changed or self.changes.pending or not self.same_objects(optimizer):
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
            reason = self.moved_operand()
            if reason is None and self._state_watch.changed():
                return f"{self.moved_state()} moved to other memory"
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
