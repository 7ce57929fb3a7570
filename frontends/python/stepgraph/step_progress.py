"""Where the step stands: read back for status and checkpoints, and restored."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ._core import GroupStatus, StepStatus, UsageError
from .group_values import values_of
from .live_group import LiveGroup
from .runners import is_capturing
from .value_sending import ValueSending


@dataclass
class Held:
    """Values of one group that were set by hand and hold over its schedules."""

    learning_rate: bool = False
    weight_decay: bool = False


@dataclass
class Records:
    """Records of steps in the order of their launches."""

    records: list[Any]
    overwritten: int
    """Lost since the last batch: the ring was full."""


PROGRESS = (
    "step",
    "skipped",
    "samples",
    "next_loss_scale",
    "growth_tracker",
    "hysteresis_left",
)
"""What of a status an executor loads, beside the steps of groups."""


def _copy_progress(source: Any, target: Any) -> None:
    for key in PROGRESS:
        setattr(target, key, getattr(source, key))


class _DeviceScalar:
    """One float32 in device memory, for torch.as_tensor."""

    def __init__(self, address: int) -> None:
        self.__cuda_array_interface__ = {
            "shape": (),
            "typestr": "<f4",
            "data": (address, False),
            "version": 3,
        }


class StepProgress(ValueSending):
    """Reads and restores counters, steps of groups, loss scale and records."""

    _scale_view: torch.Tensor | None = None
    """The executor's own scale, while its memory is there."""

    def check_readable(self, what: str) -> None:
        """Refuses to wait for the device inside a capture."""
        if self.runner is not None and is_capturing(self.index):
            raise UsageError(
                f"{what}: waits for the device, which the capture of the current stream forbids"
            )

    def refresh_steps(self) -> None:
        if self.steps_stale and self.runner is not None:
            self.check_readable("step of a group")
            self._take_steps(self.runner.executor.status())

    def _take_steps(self, status: Any) -> None:
        for bound, of_group in zip(self.groups, status.groups):
            bound.group.store("step", of_group.step)
        # Replays of a captured step count without telling anybody.
        self.steps_stale = self.captured

    def status(self, groups: Sequence[LiveGroup]) -> Any:
        """Where the step stands; waits for the steps launched so far. Groups in the order of
        `groups`."""
        self.check_readable("status")
        if self.runner is None:
            status = StepStatus()
            _copy_progress(self.progress, status)
            status.loss_scale = status.next_loss_scale
        else:
            status = self.runner.executor.status()
        if self.runner is not None and self.steps_stale:
            self._take_steps(status)
        if self.runner is not None and self.undelivered:
            _copy_progress(self.progress, status)
        if self.undelivered_loss_scale is not None:
            status.next_loss_scale = self.undelivered_loss_scale
        of_groups = []
        for group in groups:
            index = self.index_of(group)
            known = self.runner is not None and index is not None
            of_group = status.groups[index or 0] if known else GroupStatus()
            of_group.step = group.stored("step", 0)
            of_groups.append(of_group)
        status.groups = of_groups
        return status

    def held(self, group: LiveGroup) -> Held:
        """What holds over the schedules of a group."""
        index = self.index_of(group)
        if index is None:
            return Held()
        bound = self.groups[index]
        return Held(bound.lr_held, bound.weight_decay_held)

    def check_loadable(self) -> None:
        """Refuses a checkpoint inside a capture, whose replays would load it again."""
        if self.runner is not None and is_capturing(self.index):
            raise UsageError(
                "load_state_dict: the current stream is being captured, and every replay would "
                "load again; load outside the capture"
            )

    def restore(
        self,
        groups: Sequence[LiveGroup],
        progress: Any,
        held: Sequence[Held],
        steps: Sequence[int | None],
    ) -> None:
        """After the states were loaded: where the step stands, with the steps of `groups` in
        their order; None where nothing is known of it."""
        for group, step in zip(groups, steps):
            if step is not None or "step" in group:
                group.store("step", step or 0)
        self.progress = progress
        self.undelivered_loss_scale = None
        self.steps_stale = False
        self.load_pending = True
        self.held_to_load = [(each.learning_rate, each.weight_decay) for each in held]
        bound = all(self.index_of(group) is not None for group in groups)
        if self.runner is None or not bound or len(groups) != len(self.groups):
            self.structure_changed = True
            return
        self.load_progress()
        if self.captured:
            self.send_values()
            self.deliver_now()
            # Replays count from here on without telling anybody.
            self.steps_stale = True

    def load_progress(self) -> None:
        """Tells the executor where the step stands."""
        assert self.runner is not None
        of_groups = []
        for bound in self.groups:
            of_group = GroupStatus()
            of_group.step = bound.group.stored("step", 0)
            of_groups.append(of_group)
        self.progress.groups = of_groups
        self.runner.executor.load_state(self.progress)
        self.load_pending = False
        self.undelivered = self.pending = True
        for index, held in enumerate(self.held_to_load or ()):
            if index < len(self.groups):
                self._hold(index, Held(*held))
        self.held_to_load = None

    def _hold(self, index: int, held: Held) -> None:
        assert self.runner is not None
        executor, bound = self.runner.executor, self.groups[index]
        now = values_of(bound.group)
        if bound.group.stored("schedule") is not None:
            bound.lr_held = held.learning_rate
            bound.sent.learning_rate = now.learning_rate
            if held.learning_rate:
                executor.set_learning_rate(index, now.learning_rate)
            else:
                executor.resume_schedule(index)
        if bound.group.stored("weight_decay_schedule") is not None:
            bound.weight_decay_held = held.weight_decay
            bound.sent.weight_decay = now.weight_decay
            if held.weight_decay:
                executor.set_weight_decay(index, now.weight_decay)
            else:
                executor.resume_weight_decay_schedule(index)

    def keep_progress(self) -> None:
        """Before the executor goes: what its successor is told."""
        if self.runner is None:
            return
        self.check_readable("release")
        self.progress = self.status([bound.group for bound in self.groups])
        self.undelivered = False
        self.undelivered_loss_scale = None
        self.load_pending = True
        batch = self.runner.executor.read_records()
        self.kept_records.append(batch)

    def records(self) -> Records:
        """The records of steps that have finished since the last call, oldest first."""
        batches = [*self.kept_records]
        self.kept_records = []
        if self.runner is not None:
            batches.append(self.runner.executor.read_records())
        records = [record for batch in batches for record in batch.records]
        return Records(records, sum(batch.overwritten for batch in batches))

    def set_loss_scale(self, value: float) -> None:
        """The scale of the next step."""
        if not self.options.owns_loss_scale:
            raise UsageError(
                "set_loss_scale: the step has no scale of its own, expected "
                "FusedAdam(..., loss_scale=...)"
            )
        if self.runner is None:
            if not 0.0 < value < float("inf"):
                raise UsageError(f"loss_scale is {value}, expected a finite number above 0")
        else:
            self.runner.executor.set_loss_scale(value)
            self.pending = True
            self.undelivered_loss_scale = ctypes.c_float(value).value
        self.progress.next_loss_scale = ctypes.c_float(value).value
        self.load_pending = self.load_pending or self.runner is None
        if self.captured:
            self.deliver_now()

    def loss_scale_tensor(self) -> torch.Tensor:
        """The scale of the next step as a new 0-dimensional float32 tensor."""
        if not self.options.owns_loss_scale:
            raise UsageError(
                "loss_scale_tensor: the step has no scale of its own, expected "
                "FusedAdam(..., loss_scale=...)"
            )
        if self.runner is None:
            if is_capturing(self.index):
                raise UsageError(
                    "loss_scale_tensor: the step was not built before the capture; call prepare()"
                )
            return torch.tensor(self.progress.next_loss_scale, device=self.device())
        if self.undelivered or self.undelivered_loss_scale is not None:
            self.deliver_now()
        if self.undelivered or self.undelivered_loss_scale is not None:
            known = self.undelivered_loss_scale
            return torch.tensor(self.progress.next_loss_scale if known is None else known)
        address = self.runner.executor.loss_scale_address()
        if self.index < 0:
            return torch.tensor(ctypes.c_float.from_address(address).value)
        if self._scale_view is None or self._scale_view.data_ptr() != address:
            with torch.cuda.device(self.index):
                self._scale_view = torch.as_tensor(_DeviceScalar(address), device=self.device())
        return self._scale_view.clone()
