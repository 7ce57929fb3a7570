"""What a step takes over from `torch.amp.GradScaler`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from .tensors import any_not_finite, local_of


def inputs_of(
    scaler: Any, optimizer: Any, gradients: Callable[[], Sequence[torch.Tensor]]
) -> tuple[Any, Any] | None:
    """found_inf and scale for a step of `optimizer`, as tensors that nobody waits for. After
    `unscale_()` the scale is None: gradients are not unscaled twice. None if the scaler is off.
    `gradients`: those to look at where they are not in `grad`."""
    if not scaler.is_enabled():
        return None
    state = scaler._per_optimizer_states[id(optimizer)]
    ready = state["stage"].name == "READY"
    if ready:
        # Also what scaler.update() reads.
        scaler._check_inf_per_device(optimizer)
        if not state["found_inf_per_device"]:
            found_inf = any_not_finite(map(local_of, gradients()))
            if found_inf is not None:
                state["found_inf_per_device"] = {found_inf.device: found_inf.float()}
    found = list(state["found_inf_per_device"].values())
    scale = scaler._get_scale_async()
    total: Any = 0.0
    if len(found) == 1:
        total = found[0]
    elif found:
        total = sum(each.to(scale.device, non_blocking=True) for each in found)
    return total, (scale if ready else None)
