"""Found_inf and scale of a GradScaler, which the step reads from its device."""

from __future__ import annotations

from typing import Any

import torch

from ._core import UsageError
from .group_adoption import GroupAdoption
from .runners import is_capturing
from .tensors import local_of


class ScalerInputs(GroupAdoption):
    """Two scalars in the memory of the step, made when it is built."""

    def make_inputs(self, device: torch.device) -> None:
        """On the device of the step; the addresses stay."""
        if self.options.owns_loss_scale:
            return
        if self.found_inf is None or self.found_inf.device != device:
            self.found_inf = torch.zeros((), dtype=torch.float32, device=device)
            self.grad_scale = torch.ones((), dtype=torch.float32, device=device)
            self.inputs_neutral = True

    def expect_scale(self) -> None:
        """Before a step whose gradients hold a GradScaler's scale: they may have to be left
        unscaled, which takes another plan. A step that was captured, or is about to be, stays as
        it is."""
        options = self.options
        if options.scaled_from_outside or self.captured or is_capturing(self.index):
            return
        left_before = options.leaves_unscaled
        options.scaled_from_outside = True
        if options.leaves_unscaled != left_before and self.runner is not None:
            self.force_build = self.structure_changed = True

    def write_inputs(self, found_inf: Any, grad_scale: Any) -> None:
        """Of this step, in the order of the current stream."""
        if self.options.owns_loss_scale:
            raise UsageError(
                "step: a GradScaler and FusedAdam(..., loss_scale=...) are both given, expected "
                "one of them"
            )
        assert self.found_inf is not None and self.grad_scale is not None
        self.inputs_neutral = False
        _write_scalar("found_inf", self.found_inf, found_inf)
        _write_scalar("grad_scale", self.grad_scale, 1.0 if grad_scale is None else grad_scale)

    def reset_inputs(self) -> None:
        """No overflow and a scale of 1, in the order of the current stream."""
        assert self.found_inf is not None and self.grad_scale is not None
        self.found_inf.zero_()
        self.grad_scale.fill_(1.0)
        self.inputs_neutral = True


def _write_scalar(name: str, target: torch.Tensor, value: Any) -> None:
    if not isinstance(value, torch.Tensor):
        target.fill_(value)
        return
    if value.numel() != 1:
        raise UsageError(f"{name} has {value.numel()} elements, expected one")
    target.copy_(local_of(value).detach().reshape(()), non_blocking=True)
