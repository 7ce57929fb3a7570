"""What a captured step was captured with, to notice when it no longer holds."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from itertools import chain
from operator import is_
from typing import Any

import torch

from stepgraph._core import TensorWatch
from stepgraph.megatron.parts import leaves
from stepgraph.tensors import local_of

# Where Megatron's optimizers keep the parameters of the model, by class: groups of lists.
_MODEL_GROUPS = (
    "float16_groups",
    "fp32_from_fp32_groups",
    "model_float16_groups",
    "model_fp32_groups",
)
# Options that become constants of captured kernels, or decide which kernels there are.
_OPTIONS = ("clip_grad", "log_num_zeros_in_grad", "grad_norm_skip_threshold")
# Of a grad scaler: numbers that are constants of captured kernels, tensors that they read.
_SCALER_RULE = ("growth_interval", "hysteresis", "growth_factor", "backoff_factor", "min_scale")


_Lists = list[Sequence[torch.Tensor]]


def _inner_lists(leaf: Any) -> _Lists:
    return [group["params"] for group in leaf.optimizer.param_groups]


def _parameter_lists(optimizer: Any) -> tuple[_Lists, _Lists]:
    """Of the model and of the inner optimizers, in groups."""
    model: _Lists = []
    inner: _Lists = []
    for leaf in leaves(optimizer):
        if getattr(leaf, "optimizer", None) is None:
            continue
        found = [groups for name in _MODEL_GROUPS if (groups := getattr(leaf, name, None))]
        own = _inner_lists(leaf)
        model.extend(chain.from_iterable(found) if found else own)
        inner.extend(own)
    return model, inner


def _options(optimizer: Any) -> tuple[Any, ...]:
    configs = [leaf.config for leaf in leaves(optimizer)]
    return tuple(getattr(config, name, None) for config in configs for name in _OPTIONS)


def _address(tensor: torch.Tensor | None) -> int:
    if tensor is None:
        return 0
    try:
        address: int = local_of(tensor).data_ptr()
    except RuntimeError:  # a wrapper without storage of its own, as quantized parameters are
        return id(tensor)
    return address


def _rule(scaler: Any) -> tuple[Any, ...]:
    values = (getattr(scaler, name, None) for name in _SCALER_RULE)
    return tuple(_address(value) if isinstance(value, torch.Tensor) else value for value in values)


def _scalers(optimizer: Any) -> tuple[tuple[int, tuple[Any, ...]], ...]:
    """The scalers, by identity, and what captured kernels hold of their rules."""
    scalers = (getattr(leaf, "grad_scaler", None) for leaf in leaves(optimizer))
    return tuple((id(scaler), _rule(scaler)) for scaler in scalers)


@dataclasses.dataclass(frozen=True)
class Fingerprint:
    """Addresses and options that captured kernels hold on to. Reads no device memory."""

    options: tuple[Any, ...]
    scalers: tuple[tuple[int, tuple[Any, ...]], ...]
    parameters: tuple[int, ...]
    model_parameters: tuple[int, ...]
    gradients: tuple[int, ...]

    @staticmethod
    def of(optimizer: Any) -> Fingerprint:
        model_lists, inner_lists = _parameter_lists(optimizer)
        model = list(chain.from_iterable(model_lists))
        return Fingerprint(
            options=_options(optimizer),
            scalers=_scalers(optimizer),
            parameters=tuple(_address(p) for p in chain.from_iterable(inner_lists)),
            model_parameters=tuple(_address(p) for p in model),
            gradients=tuple(
                _address(p.main_grad if hasattr(p, "main_grad") else p.grad) for p in model
            ),
        )

    def difference(self, now: Fingerprint) -> str | None:
        """Says what changed from `self` to `now`, in words; None if nothing did."""
        if self == now:
            return None
        if self.options != now.options:
            return f"options {_OPTIONS} were {self.options}, are {now.options}"
        if self.scalers != now.scalers:
            if [scaler for scaler, _ in self.scalers] == [scaler for scaler, _ in now.scalers]:
                return "the rule of the grad_scaler changed"
            return "another grad_scaler was put in place"
        for what in ("parameters", "model_parameters", "gradients"):
            before, after = getattr(self, what), getattr(now, what)
            if len(before) != len(after):
                return f"{len(before)} {what.replace('_', ' ')} became {len(after)}"
            for position, (old, new) in enumerate(zip(before, after, strict=True)):
                if old != new:
                    noun = what.replace("_", " ").removesuffix("s")
                    return f"{noun} {position} moved from {old:#x} to {new:#x}"
        return None


class Look:
    """What a Fingerprint is made of, as it is now, to find out at less than half the cost that
    nothing of it changed since. Holds on to the parameters, not to the gradients."""

    def __init__(self, optimizer: Any) -> None:
        self._constants = (_options(optimizer), _scalers(optimizer))
        model_lists, inner_lists = _parameter_lists(optimizer)
        model = list(chain.from_iterable(model_lists))
        inner = list(chain.from_iterable(inner_lists))
        self._parameters = [*model, *inner]
        # A parameter without main_grad may be given one.
        without = [p for p in model if not hasattr(p, "main_grad")]
        watched = [*model, *without, *inner]
        attributes = ["main_grad"] * len(model) + ["grad"] * len(without) + [""] * len(inner)
        self._watch = TensorWatch(watched, attributes, [False] * len(watched))
        self._watch.accept()
        wrapped = any(hasattr(p, "_local_tensor") for p in self._parameters)
        #: False: there is memory that a watch cannot read, which counts as changed, always.
        self.readable = not wrapped and not self._watch.changed()

    def still_holds(self, optimizer: Any) -> bool:
        """False: something changed, or may have."""
        if not self.readable or self._constants != (_options(optimizer), _scalers(optimizer)):
            return False
        model, inner = _parameter_lists(optimizer)
        lists = [*model, *inner]
        return (
            sum(map(len, lists)) == len(self._parameters)
            and all(map(is_, chain.from_iterable(lists), self._parameters))
            and not self._watch.changed()
        )
