"""Megatron's dynamic loss scale with its state on the device.

Megatron's `DynamicGradScaler.update` decides on the host, so a step that uses it has to wait for
its own gradients. Here the same rule is a few elementwise operations on one-element tensors: they
can be captured, and a replay moves the scale.
"""

from __future__ import annotations

import importlib
from typing import Any

import torch

from stepgraph._core import UsageError


class DeviceGrowthRule:
    """What a `DynamicGradScaler` of Megatron's becomes: scale and counters are tensors that stay
    where they are.

    `update` takes a bool or a tensor of one element and enqueues on the current stream; it never
    waits. Reading `state_dict()` or a counter waits for the device. Assigning or loading writes in
    place, in stream order, so that a captured step sees the new values at its next replay.
    """

    growth_factor: torch.Tensor
    backoff_factor: torch.Tensor
    min_scale: torch.Tensor
    growth_interval: int
    hysteresis: int
    _device_scale: torch.Tensor
    _device_growth: torch.Tensor
    _device_hysteresis: torch.Tensor

    @property
    def _scale(self) -> torch.Tensor:
        return self._device_scale

    @_scale.setter
    def _scale(self, value: torch.Tensor) -> None:
        self._device_scale.copy_(value)

    @property
    def _growth_tracker(self) -> int:
        return int(self._device_growth.item())

    @_growth_tracker.setter
    def _growth_tracker(self, value: int) -> None:
        self._device_growth.fill_(int(value))

    @property
    def _hysteresis_tracker(self) -> int:
        return int(self._device_hysteresis.item())

    @_hysteresis_tracker.setter
    def _hysteresis_tracker(self, value: int) -> None:
        self._device_hysteresis.fill_(int(value))

    @torch.no_grad()
    def update(self, found_inf: bool | torch.Tensor) -> None:
        """Moves the scale after a step whose gradients were finite or not."""
        scale, growth, hysteresis = (
            self._device_scale,
            self._device_growth,
            self._device_hysteresis,
        )
        if isinstance(found_inf, torch.Tensor):
            overflow = found_inf.reshape(1) != 0
        else:
            overflow = torch.full_like(scale, bool(found_inf), dtype=torch.bool)
        growth.add_(1).masked_fill_(overflow, 0)
        hysteresis.sub_(overflow.to(hysteresis.dtype))
        # Megatron compares for equality, and so does this: a smaller interval loaded later must
        # not make the two differ.
        grows = (growth == self.growth_interval).logical_and_(overflow.logical_not())
        shrinks = (hysteresis <= 0).logical_and_(overflow)
        smaller = torch.maximum(scale * self.backoff_factor, self.min_scale)
        larger = scale * self.growth_factor
        scale.copy_(torch.where(shrinks, smaller, torch.where(grows, larger, scale)))
        growth.masked_fill_(grows, 0)
        hysteresis.masked_fill_(grows, self.hysteresis)

    def state_dict(self) -> dict[str, Any]:
        """What Megatron's scaler gives: a scale that later steps do not change, and ints."""
        return {
            "scale": self._device_scale.clone(),
            "growth_tracker": self._growth_tracker,
            "hysteresis_tracker": self._hysteresis_tracker,
        }


# A scaler keeps its identity, so its class is exchanged. Python allows that for a subclass that
# adds members only, not for one with a second base.
_MEMBERS = {
    name: member
    for name, member in vars(DeviceGrowthRule).items()
    if isinstance(member, property) or callable(member)
}
_device_classes: dict[type, type] = {}


def is_on_device(scaler: Any) -> bool:
    """Whether `move_to_device` has changed this scaler."""
    return type(scaler) in _device_classes.values()


def move_to_device(scaler: Any) -> None:
    """Makes `scaler`, a Megatron grad scaler or None, decide nothing on the host from now on.

    The object stays the same, an instance of its class, with its present scale and counters; doing
    it again changes nothing. A constant scaler is left as it is. Raises UsageError for a scaler
    whose rule is not known, and changes nothing then.
    """
    if scaler is None or is_on_device(scaler):
        return
    scalers = importlib.import_module("megatron.core.optimizer.grad_scaler")
    kind = type(scaler)
    if kind is scalers.ConstantGradScaler:
        return
    if kind is not scalers.DynamicGradScaler:
        raise UsageError(
            f"grad_scaler is a {kind.__module__}.{kind.__qualname__}; a captured step knows the "
            "rules of Megatron's DynamicGradScaler and ConstantGradScaler"
        )
    state = vars(scaler)
    scale = state["_scale"].detach().clone().reshape(1)
    growth = torch.full_like(scale, state["_growth_tracker"], dtype=torch.int32)
    hysteresis = torch.full_like(scale, state["_hysteresis_tracker"], dtype=torch.int32)
    for name in ("_scale", "_growth_tracker", "_hysteresis_tracker"):
        del state[name]
    scaler._device_scale = scale
    scaler._device_growth = growth
    scaler._device_hysteresis = hysteresis
    if kind not in _device_classes:
        named = {"__module__": kind.__module__, "__qualname__": kind.__qualname__}
        _device_classes[kind] = type(kind)(kind.__name__, (kind,), {**_MEMBERS, **named})
    scaler.__class__ = _device_classes[kind]
