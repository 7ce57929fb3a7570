"""What a captured step was captured with, to notice when it no longer holds."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import torch

from stepgraph.megatron.parts import leaves

# Where Megatron's optimizers keep the parameters of the model, by class: groups of lists.
_MODEL_GROUPS = (
    "float16_groups",
    "fp32_from_fp32_groups",
    "model_float16_groups",
    "model_fp32_groups",
)
# Options that become constants of captured kernels, or decide which kernels there are.
_OPTIONS = ("clip_grad", "log_num_zeros_in_grad", "grad_norm_skip_threshold")


def _model_parameters(optimizer: Any) -> Iterator[torch.Tensor]:
    for leaf in leaves(optimizer):
        if getattr(leaf, "optimizer", None) is None:
            continue
        found = [groups for name in _MODEL_GROUPS if (groups := getattr(leaf, name, None))]
        if not found:
            found = [[group["params"] for group in leaf.optimizer.param_groups]]
        for groups in found:
            for group in groups:
                yield from group


def _optimizer_parameters(optimizer: Any) -> Iterator[torch.Tensor]:
    for leaf in leaves(optimizer):
        if getattr(leaf, "optimizer", None) is not None:
            for group in leaf.optimizer.param_groups:
                yield from group["params"]


def _address(tensor: torch.Tensor | None) -> int:
    if tensor is None:
        return 0
    try:
        address: int = getattr(tensor, "_local_tensor", tensor).data_ptr()
    except RuntimeError:  # a wrapper without storage of its own, as quantized parameters are
        return id(tensor)
    return address


@dataclasses.dataclass(frozen=True)
class Fingerprint:
    """Addresses and options that captured kernels hold on to. Reads no device memory."""

    options: tuple[Any, ...]
    scalers: tuple[int, ...]
    parameters: tuple[int, ...]
    model_parameters: tuple[int, ...]
    gradients: tuple[int, ...]

    @staticmethod
    def of(optimizer: Any) -> Fingerprint:
        configs = [leaf.config for leaf in leaves(optimizer)]
        model = list(_model_parameters(optimizer))
        return Fingerprint(
            options=tuple(getattr(config, name, None) for config in configs for name in _OPTIONS),
            scalers=tuple(id(getattr(leaf, "grad_scaler", None)) for leaf in leaves(optimizer)),
            parameters=tuple(_address(p) for p in _optimizer_parameters(optimizer)),
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
