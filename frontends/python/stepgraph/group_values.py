"""Hyperparameters of a group: what the dictionary holds, checked and as the core takes it."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch

from ._core import UsageError
from .live_group import LiveGroup


@dataclass(slots=True)
class GroupValues:
    """Values that setters of the executor send."""

    learning_rate: float
    weight_decay: float
    beta1: float
    beta2: float
    eps: float


def _number(name: str, key: str, value: Any) -> float:
    if isinstance(value, torch.Tensor):
        if value.numel() != 1:
            raise UsageError(f"{name}: {key} has {value.numel()} elements, expected one")
        return float(value)
    if isinstance(value, bool) or not hasattr(value, "__float__"):
        raise UsageError(f"{name}: {key} is {value!r}, expected a number or a tensor of one")
    return float(value)


def _check_not_negative(name: str, key: str, value: float) -> None:
    if not (value >= 0.0) or math.isinf(value):
        raise UsageError(f"{name}: {key} is {value}, expected a finite number of at least 0")


def check_value(name: str, key: str, value: Any) -> None:
    """Refuses a bad `lr`, `weight_decay`, `eps` or `betas`, naming the group. Of tensors, which may
    be on a device, only what needs no waiting is checked."""
    if key == "betas":
        if isinstance(value, (str, bytes)) or not hasattr(value, "__len__") or len(value) != 2:
            raise UsageError(f"{name}: betas is {value!r}, expected two numbers")
        for beta in value:
            if isinstance(beta, torch.Tensor) and beta.is_cuda:
                continue
            number = _number(name, "betas", beta)
            if not 0.0 <= number < 1.0:
                raise UsageError(f"{name}: betas holds {number}, expected numbers in [0, 1)")
        return
    if isinstance(value, torch.Tensor) and value.is_cuda:
        if value.numel() != 1:
            raise UsageError(f"{name}: {key} has {value.numel()} elements, expected one")
        return
    _check_not_negative(name, key, _number(name, key, value))


def check_step(name: str, value: Any) -> int:
    """The step count of a group as an int: a number of updates, or a tensor of one."""
    if isinstance(value, torch.Tensor):
        value = value.item()
    if isinstance(value, bool) or not isinstance(value, (int, float)) or value != int(value):
        raise UsageError(f"{name}: step is {value!r}, expected an int of at least 0")
    if value < 0:
        raise UsageError(f"{name}: step is {value}, expected an int of at least 0")
    return int(value)


def is_input(value: Any, device: torch.device) -> bool:
    """Whether a step on this device can read the value by its address."""
    return (
        isinstance(value, torch.Tensor)
        and value.dtype is torch.float32
        and value.numel() == 1
        and value.device == device
    )


def values_of(group: LiveGroup) -> GroupValues:
    """What to send of a group. Values that the step reads from tensors of its device by itself
    count as 0; other CUDA tensors are waited for."""
    betas = group.stored("betas")
    lr, weight_decay = group.stored("lr"), group.stored("weight_decay", 0.0)
    name = group.name
    return GroupValues(
        0.0 if lr is None else _value_or_input(name, "lr", lr, group, "lr_input"),
        _value_or_input(name, "weight_decay", weight_decay, group, "weight_decay_input"),
        _number(name, "betas", betas[0]),
        _number(name, "betas", betas[1]),
        _number(name, "eps", group.stored("eps")),
    )


def _value_or_input(name: str, key: str, value: Any, group: LiveGroup, input: str) -> float:
    return 0.0 if getattr(group, input) is value else _number(name, key, value)


def watched_values(group: LiveGroup) -> list[Any]:
    """Values that may change without an assignment: tensors that the step does not read by itself,
    and betas in a list."""
    watched: list[Any] = []
    for key, input in (("lr", group.lr_input), ("weight_decay", group.weight_decay_input)):
        value = group.stored(key)
        if isinstance(value, torch.Tensor) and value is not input:
            watched.append(value)
    if isinstance(group.stored("eps"), torch.Tensor):
        watched.append(group.stored("eps"))
    betas = group.stored("betas")
    if not isinstance(betas, tuple) or any(isinstance(beta, torch.Tensor) for beta in betas):
        watched.append(betas)
    return watched


def fingerprint(value: Any) -> Any:
    """Something that differs once a watched value has changed. Of CUDA tensors it is the count of
    their changes, which takes no waiting."""
    if isinstance(value, torch.Tensor):
        return (id(value), value._version) if value.is_cuda else float(value)
    if isinstance(value, (tuple, list)):
        return tuple(fingerprint(each) for each in value)
    return value
