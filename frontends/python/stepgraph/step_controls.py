"""Methods of FusedAdam for the step as a whole."""

from __future__ import annotations

from typing import Any

import torch

from ._core import UsageError
from .live_group import LiveGroup
from .step_engine import StepEngine
from .step_progress import Records


class StepControls:
    """Clipping, loss scale, schedules, status, captures and the end."""

    engine: StepEngine

    def clip_grad_norm(self, max_norm: float) -> None:
        """Clips the global norm of the gradient to `max_norm` from the next step on; 0: no
        clipping."""
        self.engine.set_norm_option("max_norm", float(max_norm))

    def skip_above_norm(self, norm: float) -> None:
        """Skips steps whose gradient has a larger norm from the next step on; 0: none."""
        self.engine.set_norm_option("skip_above_norm", float(norm))

    def set_loss_scale(self, scale: float) -> None:
        """The loss scale of the next step; its counters stay."""
        self.engine.set_loss_scale(float(scale))

    def loss_scale_tensor(self) -> torch.Tensor:
        """The scale that the next step expects in the gradients, as a new 0-dimensional float32
        tensor, copied in the order of the current stream: multiply the loss by it. Call it at every
        iteration, inside the capture too."""
        return self.engine.loss_scale_tensor()

    def resume_schedule(self, group: int) -> None:
        """Gives the learning rate of a group, which was set by hand, back to its schedule."""
        self.engine.resume_schedule(self._group(group), decay=False)

    def resume_weight_decay_schedule(self, group: int) -> None:
        """The same for its weight decay."""
        self.engine.resume_schedule(self._group(group), decay=True)

    def _group(self, number: int) -> LiveGroup:
        groups = self.engine.adopt_groups(self)
        if not 0 <= number < len(groups):
            raise UsageError(f"group {number} does not exist, the optimizer has {len(groups)}")
        return groups[number]

    def status(self) -> Any:
        """Where the step stands (StepStatus); waits for the steps made so far."""
        return self.engine.status(self.engine.adopt_groups(self))

    def records(self) -> Records:
        """The records of the steps that have finished since the last call; waits for nothing.
        Empty without FusedAdam(records=...)."""
        return self.engine.records()

    def deliver(self) -> None:
        """Delivers values that were set, and memory that moved before a capture, in the order of
        the current stream. Assignments to groups do so by themselves once a step was captured.
        Gradients that were dropped since stay where the captured step has them."""
        self.engine.deliver(self)

    def abandon_captured_steps(self) -> None:
        """Says that the caller's graphs with captured steps will not be replayed any more, so that
        gradients may move again."""
        self.engine.abandon_captured_steps()

    @property
    def captured(self) -> bool:
        """Whether a step was recorded into a capture of the caller's, so that replays may run it at
        any time: until abandon_captured_steps() or release()."""
        return self.engine.captured

    def recapture_required(self) -> str | None:
        """Why replays of a captured step would be wrong, or None. A gradient that was dropped
        (None) is no reason: replays read the memory that it had."""
        return self.engine.recapture_required()

    def release(self) -> None:
        """Waits for the steps made so far and frees graph and device memory of the step; captured
        steps must not be replayed any more. A later step builds anew and goes on where this one
        stood."""
        self.engine.release()

    @property
    def captures(self) -> int:
        """How often the step was built or built anew."""
        return self.engine.captures

    @property
    def rebinds(self) -> int:
        """How many operands were re-bound without building anew."""
        return self.engine.rebinds

    @property
    def last_update(self) -> Any:
        """What the latest change of the plan did and why (UpdateReport), or None."""
        return self.engine.last_update
