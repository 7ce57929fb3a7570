"""What a Megatron optimizer consists of."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from typing import Any

import torch

from stepgraph._core import UsageError
from stepgraph.fused_adam import FusedAdam


def leaves(optimizer: Any) -> Iterator[Any]:
    """The optimizers of a chain, nested chains included, in order; or the optimizer itself."""
    if hasattr(optimizer, "chained_optimizers"):
        for chained in optimizer.chained_optimizers:
            yield from leaves(chained)
    else:
        yield optimizer


def fused_adams(optimizer: Any) -> list[FusedAdam]:
    """The inner optimizers. A rank without trainable parameters has none."""
    inner = (getattr(leaf, "optimizer", None) for leaf in leaves(optimizer))
    return [adam for adam in inner if adam is not None]


def has_parameters(adam: FusedAdam) -> bool:
    """False on a rank whose share of a sharded optimizer holds padding alone."""
    return any(group["params"] for group in adam.param_groups)


def gradients(adams: list[FusedAdam]) -> list[tuple[torch.Tensor, str, torch.Tensor]]:
    """The gradients that the inner optimizers have: parameter, attribute, gradient."""
    return [
        (parameter, attribute, gradient)
        for adam in adams
        for group in adam.param_groups
        for parameter in group["params"]
        for attribute in ("grad", "decoupled_grad")
        if (gradient := getattr(parameter, attribute, None)) is not None
    ]


def check_capturable(optimizer: Any) -> None:
    """Raises UsageError, naming option and optimizer, if the step cannot be captured."""
    clip_grads = importlib.import_module("megatron.core.optimizer.clip_grads")
    if getattr(clip_grads, "multi_tensor_scale_tensor_impl", None) is None:
        raise UsageError(
            "megatron.core.optimizer.clip_grads.multi_tensor_scale_tensor_impl is None, so "
            "Megatron clips by a number on the host. Call stepgraph.megatron.install()"
        )
    for position, leaf in enumerate(leaves(optimizer)):
        if getattr(leaf.config, "overlap_param_gather_with_optimizer_step", False):
            raise UsageError(
                "overlap_param_gather_with_optimizer_step starts an all-gather inside the step "
                "that ends outside it; a graph cannot hold half of it. Expected False, found True"
            )
        adam = getattr(leaf, "optimizer", None)
        if adam is None:
            continue
        where = f"optimizer {position} ({type(leaf).__name__})"
        if not isinstance(adam, FusedAdam):
            raise UsageError(
                f"{where}: expected stepgraph.FusedAdam inside, found "
                f"{type(adam).__module__}.{type(adam).__qualname__}. Call "
                "stepgraph.megatron.install() before Megatron builds its optimizer"
            )
        if device_of(optimizer).type == "cuda" and not adam.capturable:
            raise UsageError(
                f"{where}: FusedAdam(capturable=False) keeps its learning rate on the host. "
                "Set OptimizerConfig.optimizer_cuda_graph (--optimizer-cuda-graph) before "
                "Megatron builds its optimizer"
            )


def device_of(optimizer: Any) -> torch.device:
    """Where the step runs: the device of the first parameter, or the current one without any."""
    for adam in fused_adams(optimizer):
        for group in adam.param_groups:
            for parameter in group["params"]:
                device: torch.device = parameter.device
                return device
    if torch.cuda.is_available():
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")
