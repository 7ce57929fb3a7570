"""Keeps Megatron's step from reading device memory on the host."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from stepgraph._core import CaptureError

_DEFERRED = torch.Tensor.item
_COMPARISON = torch.Tensor.gt
_DECISIONS = {
    torch.Tensor.__bool__,
    torch.Tensor.__float__,
    torch.Tensor.__int__,
    torch.Tensor.__index__,
    torch.Tensor.tolist,
    torch.Tensor.numpy,
    torch.Tensor.cpu,
}
_HANDLED = {_DEFERRED, _COMPARISON} | _DECISIONS


class NoHostReads(TorchFunctionMode):
    """While active, Megatron's `tensor.item()` gives a scalar on the device instead of a number.

    Arithmetic on it then stays on the device. What cannot stay there, a branch or a conversion to a
    number, raises CaptureError with the place, instead of CUDA's invalidated capture. Only code in
    the package `megatron` and tensors on `device` are concerned.
    """

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self._device_type = device.type

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        if func in _HANDLED:
            caller = sys._getframe(1)
            tensor = args[0]
            if (
                isinstance(tensor, torch.Tensor)
                and tensor.device.type == self._device_type
                and caller.f_globals.get("__name__", "").startswith("megatron.")
            ):
                if func == _DEFERRED:
                    return tensor.detach().clone().reshape(())
                if func in _DECISIONS:
                    raise CaptureError(
                        f"{caller.f_code.co_filename}:{caller.f_lineno}: {func.__name__}() of a "
                        "tensor on the device: this step of Megatron's decides on the host and so "
                        "cannot be captured"
                    )
                # Nothing is larger than infinity: a threshold that is off needs no value.
                if isinstance(args[1], float) and args[1] == math.inf:
                    return False
        return func(*args, **kwargs)
