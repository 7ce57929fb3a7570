"""Hyperparameters on their way from groups to the executor."""

from __future__ import annotations

from typing import Any

import torch

from ._core import UsageError
from .engine_state import EngineState
from .group_values import (
    check_step,
    check_value,
    fingerprint,
    is_input,
    values_of,
    watched_values,
)
from .live_group import VALUES, LiveGroup
from .runners import is_capturing

_SCHEDULED = {
    "lr": ("learning_rate", "schedule", "lr_held"),
    "weight_decay": ("weight_decay", "weight_decay_schedule", "weight_decay_held"),
}
"""Of values that a schedule may give: the executor's name, the schedule's key, and where it is kept
that one set by hand holds over it."""


class ValueSending(EngineState):
    """Observes the groups and sends what is assigned to them."""

    # GroupObserver.

    def assigning(self, group: LiveGroup, key: str, value: Any) -> Any:
        if key == "step":
            step = check_step(group.name, value)
            self.refresh_steps()
            return step
        check_value(group.name, key, value)
        if key == "lr":
            return self._assign_learning_rate(group, value)
        return value

    def _assign_learning_rate(self, group: LiveGroup, value: Any) -> Any:
        """Where the step reads the learning rate from a tensor that captures may have recorded,
        fills that."""
        live = group.lr_input
        if live is None or value is live or not self._keeps_tensor(live):
            return value
        if is_capturing(self.index):
            raise UsageError(
                f"{group.name}: lr is assigned while the current stream is being captured, and "
                "every replay would assign it again; assign it outside"
            )
        if isinstance(value, torch.Tensor) and value.is_cuda:
            with torch.no_grad():
                live.copy_(value.detach().reshape(live.shape))
        else:
            live.fill_(float(value))
        group.lr_source = value if isinstance(value, torch.Tensor) and not value.is_cuda else None
        self.structure_changed = self.structure_changed or group.lr_source is not None
        return live

    def _keeps_tensor(self, live: torch.Tensor) -> bool:
        return self.capturable and live.is_cuda

    def assigned(self, group: LiveGroup, key: str) -> None:
        if self.runner is None:
            self.structure_changed = True
            return
        index = self.index_of(group)
        if index is None or (key not in VALUES and key != "step"):
            self.structure_changed = True
            return
        if key == "step":
            self.runner.executor.set_group_step(index, group.stored("step"))
            self.pending = True
            if self.captured:
                self.deliver_now()
            return
        value = group.stored(key)
        if key == "lr" and value is group.lr_input:
            return
        if isinstance(value, (float, int)) and index not in self.changed_groups:
            # What schedulers do to every group between two steps.
            input = {"lr": group.lr_input, "weight_decay": group.weight_decay_input}
            if key in input and input[key] is None:
                self._send_at_once(index, key, float(value))
                return
        self.changed_groups.add(index)
        if self._inputs_differ(group):
            self.structure_changed = True
        elif self.captured:
            self.send_values()
            self.deliver_now()

    def _send_at_once(self, index: int, key: str, value: float) -> None:
        """`lr` or `weight_decay` of a group, without comparing the rest of it."""
        assert self.runner is not None
        name, schedule, held = _SCHEDULED[key]
        bound = self.groups[index]
        scheduled = bound.group.stored(schedule) is not None
        if value == getattr(bound.sent, name) and not bound.watched and not scheduled:
            return
        getattr(self.runner.executor, f"set_{name}")(index, value)
        setattr(bound.sent, name, value)
        setattr(bound, held, scheduled)
        self.pending = True
        if bound.watched:
            # The value that was assigned may have taken the place of a watched one.
            self.changed_groups.add(index)
        if self.captured:
            self.deliver_now()

    # Inputs: values that the step reads from tensors by itself.

    def _inputs_differ(self, group: LiveGroup) -> bool:
        device = self.device()
        for key, input in (("lr", group.lr_input), ("weight_decay", group.weight_decay_input)):
            value = group.stored(key)
            if value is input:
                continue
            if input is not None or is_input(value, device) or isinstance(value, torch.Tensor):
                return True
        return False

    def bind_inputs(self, group: LiveGroup, device: torch.device) -> None:
        """Finds the values of a group that the step reads from tensors, and makes `lr` such a
        tensor where captures need it."""
        lr = group.stored("lr")
        group.lr_input = None
        if group.stored("schedule") is None:
            if self.capturable and device.type == "cuda" and not is_input(lr, device):
                tensor = torch.full((), float(lr), dtype=torch.float32, device=device)
                group.lr_source = lr if isinstance(lr, torch.Tensor) and not lr.is_cuda else None
                group.store("lr", tensor)
                initial = group.stored("initial_lr")
                if initial is lr and isinstance(initial, torch.Tensor):
                    group.store("initial_lr", initial.detach().clone())
                lr = tensor
            if is_input(lr, device):
                group.lr_input = lr
        decay = group.stored("weight_decay")
        scheduled = group.stored("weight_decay_schedule") is not None
        group.weight_decay_input = decay if is_input(decay, device) and not scheduled else None

    def follow_sources(self, group: LiveGroup) -> None:
        """A CPU tensor that was assigned to `lr` and copied to the device may change in place."""
        if group.lr_source is not None and group.lr_input is not None:
            group.lr_input.fill_(float(group.lr_source))

    # Sending.

    def watch_values(self) -> None:
        """Notes which groups have values that may change without an assignment."""
        self.watched_groups = []
        for index, bound in enumerate(self.groups):
            bound.watched = watched_values(bound.group)
            if bound.group.lr_source is not None:
                bound.watched.append(bound.group.lr_source)
            if bound.watched:
                bound.fingerprint = fingerprint(bound.watched)
                self.watched_groups.append(index)

    def compare_watched(self) -> None:
        """Finds watched values that changed in place."""
        for index in self.watched_groups:
            bound = self.groups[index]
            now = fingerprint(bound.watched)
            if now != bound.fingerprint:
                if is_capturing(self.index):
                    raise UsageError(
                        f"{bound.group.name}: a tensor of lr, weight_decay, betas or eps changed, "
                        "and the capture of the current stream forbids to read it; call deliver() "
                        "before the capture"
                    )
                bound.fingerprint = now
                self.follow_sources(bound.group)
                self.changed_groups.add(index)

    def send_values(self) -> None:
        """Sends the values of groups that changed. Each is noted once the executor has accepted it,
        so a refused one is refused again at the next step."""
        assert self.runner is not None
        executor = self.runner.executor
        for index in sorted(self.changed_groups):
            bound = self.groups[index]
            now, sent = values_of(bound.group), bound.sent
            if now != sent:
                if (now.beta1, now.beta2) != (sent.beta1, sent.beta2):
                    executor.set_betas(index, now.beta1, now.beta2)
                if now.eps != sent.eps:
                    executor.set_eps(index, now.eps)
                if now.learning_rate != sent.learning_rate and bound.group.lr_input is None:
                    executor.set_learning_rate(index, now.learning_rate)
                    bound.lr_held = bound.group.stored("schedule") is not None
                if now.weight_decay != sent.weight_decay and (
                    bound.group.weight_decay_input is None
                ):
                    executor.set_weight_decay(index, now.weight_decay)
                    bound.weight_decay_held = (
                        bound.group.stored("weight_decay_schedule") is not None
                    )
                bound.sent = now
                self.pending = True
            bound.watched = watched_values(bound.group)
            if bound.group.lr_source is not None:
                bound.watched.append(bound.group.lr_source)
            bound.fingerprint = fingerprint(bound.watched)
            if bound.watched and index not in self.watched_groups:
                self.watched_groups.append(index)
            self.changed_groups.discard(index)

    def hold_again(self) -> None:
        """After a new plan, which gives everything back to its schedule."""
        assert self.runner is not None
        for index, bound in enumerate(self.groups):
            if bound.lr_held:
                self.runner.executor.set_learning_rate(index, bound.sent.learning_rate)
            if bound.weight_decay_held:
                self.runner.executor.set_weight_decay(index, bound.sent.weight_decay)

    def deliver_now(self) -> None:
        """Delivers what was sent, where something other than a step can."""
        if self.runner is not None and self.runner.deliver():
            self.delivered()

    def delivered(self) -> None:
        """Everything sent so far has reached the step."""
        self.pending = False
        self.undelivered = False
        self.undelivered_loss_scale = None

    def refresh_steps(self) -> None:
        raise NotImplementedError
