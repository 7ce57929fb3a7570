"""What the core needs to know of a tensor: address, format and device; and what may be stepped.

A parameter may be a plain tensor, a DTensor, raw FP8 bytes with the scaling that the user named, a
Float8Tensor of Transformer Engine (recognised by its attributes), or another quantized tensor whose
master is stepped and quantized afterwards.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch

from ._core import UsageError
from .state_formats import flat_memory

FORMATS: dict[torch.dtype, str] = {
    torch.float32: "f32",
    torch.float16: "f16",
    torch.bfloat16: "bf16",
    torch.float8_e4m3fn: "e4m3",
    torch.float8_e5m2: "e5m2",
}
"""Storage formats of the core by dtype; of uint8, the use decides."""

FP8_DTYPES = {"e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2}

GRADIENT_DTYPES = (torch.float32, torch.float16, torch.bfloat16)


@dataclass(frozen=True, eq=False)
class Fp8Scaling:
    """Delayed scaling of one FP8 parameter: three float32 scalars on its device, written by the
    step (`amax`, `scale_inv`) or read by it (`scale`)."""

    scale: torch.Tensor
    amax: torch.Tensor
    scale_inv: torch.Tensor
    format: str


@dataclass(frozen=True, eq=False)
class ParameterView:
    """One parameter as the step sees it."""

    local: torch.Tensor
    """The elements on this rank: the parameter itself, the local shard of a DTensor, the bytes of
    an FP8 tensor. Of a quantized tensor its own shape stands for them: `local` is the tensor."""
    format: str
    scaling: Fp8Scaling | None = None
    distributed: bool = False
    """The parameter is a DTensor."""
    quantized: bool = False
    """The master is stepped in its place, and the tensor is quantized from it afterwards."""
    float8: bool = False
    """Its class caches what is derived from its bytes."""

    @property
    def watchable(self) -> bool:
        """Its memory and gradient can be found by `TensorWatch`."""
        return not (self.quantized or self.float8)


def device_index(device: torch.device) -> int:
    """The device as the core numbers it: -1 is the host."""
    if device.type == "cpu":
        return -1
    return torch.cuda.current_device() if device.index is None else device.index


def operand(
    tensor: torch.Tensor, format: str, scales: torch.Tensor | None = None
) -> tuple[int, str, int]:
    """Address, format and address of the block scales."""
    return (tensor.data_ptr(), format, 0 if scales is None else scales.data_ptr())


def dtensor_type() -> type | None:
    """torch's DTensor, if the program has loaded it: otherwise there is none about."""
    module = sys.modules.get("torch.distributed.tensor")
    return None if module is None else getattr(module, "DTensor", None)


def is_dtensor(tensor: Any) -> bool:
    """Whether it is a DTensor."""
    kind = dtensor_type()
    return kind is not None and isinstance(tensor, kind)


def local_of(tensor: torch.Tensor) -> torch.Tensor:
    """The local shard of a DTensor, or the tensor."""
    if not is_dtensor(tensor):
        return tensor
    local: torch.Tensor = tensor._local_tensor  # type: ignore[attr-defined]
    return local


def wrap_like(local: torch.Tensor, parameter: torch.Tensor) -> torch.Tensor:
    """A DTensor of the parameter's mesh, placement and shape around `local`, if it is one."""
    if not is_dtensor(parameter):
        return local
    like: Any = parameter
    wrapped: torch.Tensor = type(like).from_local(
        local,
        device_mesh=like.device_mesh,
        placements=like.placements,
        run_check=False,
        shape=like.shape,
        stride=like.stride(),
    )
    return wrapped


def same_layout(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether equal addresses hold equal elements."""
    if a.is_contiguous() and b.is_contiguous():
        return a.numel() == b.numel()
    return a.shape == b.shape and a.stride() == b.stride()


def is_dense(tensor: torch.Tensor) -> bool:
    """Whether its elements fill one range of memory, each once."""
    if tensor.is_contiguous():
        return True
    expected = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape)):
        if size == 1:
            continue
        if stride != expected:
            return False
        expected *= size
    return True


def check_dense(name: str, operand_name: str, tensor: torch.Tensor) -> None:
    """Refuses what is not one dense range of host or CUDA memory."""
    if tensor.layout is not torch.strided:
        raise UsageError(
            f"{name}: the {operand_name} is sparse (layout {tensor.layout}), expected a dense one"
        )
    if tensor.device.type not in ("cpu", "cuda"):
        raise UsageError(f"{name}: the {operand_name} is on {tensor.device}, expected cpu or cuda")
    if not is_dense(tensor):
        raise UsageError(
            f"{name}: the {operand_name} is not contiguous (sizes {tuple(tensor.shape)}, strides "
            f"{tuple(tensor.stride())}), expected dense memory"
        )


def check_gradient(name: str, view: ParameterView, gradient: torch.Tensor) -> torch.Tensor:
    """Refuses a gradient that does not fit the parameter; returns its local tensor."""
    local = local_of(gradient)
    if view.distributed and local is gradient:
        raise UsageError(f"{name}: the gradient is a plain tensor, expected a DTensor")
    check_dense(name, "gradient", local)
    if local.dtype not in GRADIENT_DTYPES:
        raise UsageError(
            f"{name}: the gradient has type {local.dtype}, expected float32, float16 or bfloat16"
        )
    if local.device != view.local.device:
        raise UsageError(
            f"{name}: the gradient is on {local.device}, expected {view.local.device} as the "
            "parameter"
        )
    if local.shape != view.local.shape:
        raise UsageError(
            f"{name}: the gradient has sizes {tuple(local.shape)}, expected "
            f"{tuple(view.local.shape)} as the parameter"
        )
    if not view.quantized and not same_layout(local, view.local):
        raise UsageError(
            f"{name}: the gradient has strides {tuple(local.stride())}, expected "
            f"{tuple(view.local.stride())} as the parameter (not contiguous)"
        )
    return local


def _check_scaling(name: str, local: torch.Tensor, scaling: Fp8Scaling) -> None:
    if scaling.format not in FP8_DTYPES:
        raise UsageError(f"{name}: the FP8 format is {scaling.format!r}, expected e4m3 or e5m2")
    for key in ("scale", "amax", "scale_inv"):
        scalar = getattr(scaling, key)
        if not isinstance(scalar, torch.Tensor):
            raise UsageError(
                f"{name}: {key} is a {type(scalar).__name__}, expected a float32 tensor of one "
                "element"
            )
        if scalar.dtype is not torch.float32 or scalar.numel() != 1:
            raise UsageError(
                f"{name}: {key} has type {scalar.dtype} and {scalar.numel()} elements, expected "
                "one float32"
            )
        if scalar.device != local.device:
            raise UsageError(
                f"{name}: {key} is on {scalar.device}, expected {local.device} as the parameter"
            )


def _view_float8(name: str, parameter: Any) -> ParameterView:
    """A Float8Tensor of Transformer Engine, with delayed scaling if its quantizer has that."""
    quantizer = parameter._quantizer
    if getattr(quantizer, "scale", None) is None or getattr(quantizer, "amax", None) is None:
        # Scales of the data itself: nothing is known before the values are.
        return view_quantized(name, parameter)
    kind = getattr(parameter._fp8_dtype, "name", str(parameter._fp8_dtype)).lower()
    format = "e5m2" if "e5m2" in kind else "e4m3" if "e4m3" in kind else kind
    scaling = Fp8Scaling(quantizer.scale, quantizer.amax, parameter._scale_inv, format)
    data = parameter._data
    _check_scaling(name, data, scaling)
    check_dense(name, "parameter", data)
    return ParameterView(data, format, scaling, float8=True)


def scaling_addresses_of(parameter: Any) -> tuple[int, ...]:
    """Where a Float8Tensor keeps its scaling now."""
    quantizer = parameter._quantizer
    return (quantizer.scale.data_ptr(), quantizer.amax.data_ptr(), parameter._scale_inv.data_ptr())


def scaling_addresses(view: ParameterView) -> tuple[int, ...]:
    """Where the scaling of a parameter is; nothing without."""
    if view.scaling is None:
        return ()
    scaling = view.scaling
    return (scaling.scale.data_ptr(), scaling.amax.data_ptr(), scaling.scale_inv.data_ptr())


def view_quantized(name: str, parameter: torch.Tensor) -> ParameterView:
    """A tensor that only its own class can quantize: MXFP8 and other block scales."""
    if not (hasattr(parameter, "quantize_") and hasattr(parameter, "dequantize")):
        raise UsageError(
            f"{name}: the parameter is a {type(parameter).__name__}, expected a plain tensor, a "
            "DTensor or a quantized tensor with quantize_ and dequantize"
        )
    return ParameterView(parameter, "f32", quantized=True)


def is_float8_tensor(parameter: Any) -> bool:
    """Whether it has what the step needs of Transformer Engine's Float8Tensor."""
    return all(
        getattr(parameter, attribute, None) is not None
        for attribute in ("_data", "_scale_inv", "_fp8_dtype", "_quantizer")
    )


def view_parameter(
    name: str, parameter: torch.Tensor, scaling: Fp8Scaling | None = None
) -> ParameterView:
    """How the step sees a parameter; refuses what it cannot step, naming it. `scaling` is what the
    user said of it."""
    if type(parameter) is not torch.nn.Parameter and type(parameter) is not torch.Tensor:
        if is_float8_tensor(parameter):
            return _view_float8(name, parameter)
        if hasattr(parameter, "_quantizer") or hasattr(parameter, "quantize_"):
            return view_quantized(name, parameter)
    local = local_of(parameter)
    check_dense(name, "parameter", local)
    if scaling is not None:
        _check_scaling(name, local, scaling)
        if local.dtype not in (torch.uint8, FP8_DTYPES[scaling.format]):
            raise UsageError(
                f"{name}: the parameter has type {local.dtype}, expected uint8 or "
                f"{FP8_DTYPES[scaling.format]} for FP8 {scaling.format}"
            )
        return ParameterView(local, scaling.format, scaling, local is not parameter)
    if local.dtype is torch.uint8 or local.dtype in FP8_DTYPES.values():
        raise UsageError(
            f"{name}: the parameter has type {local.dtype} without scaling, expected "
            "set_fp8_scaling(parameter, scale, amax, scale_inv) before the first step"
        )
    if local.dtype not in FORMATS:
        raise UsageError(
            f"{name}: the parameter has type {local.dtype}, expected float32, float16, bfloat16 or "
            "FP8 with scaling"
        )
    return ParameterView(local, FORMATS[local.dtype], None, local is not parameter)


def dequantized(view: ParameterView) -> torch.Tensor:
    """The parameter's values as a new float32 tensor of its layout."""
    if view.quantized:
        return view.local.dequantize().detach().to(torch.float32, copy=True).contiguous()
    if view.scaling is None:
        return view.local.detach().to(torch.float32, copy=True)
    values = torch.empty_like(view.local, dtype=torch.float32)
    stored = flat_memory(view.local).view(torch.uint8)
    flat_memory(values).copy_(stored.view(FP8_DTYPES[view.scaling.format]))
    return values.mul_(view.scaling.scale_inv.reshape(()))


def any_not_finite(tensors: Iterable[torch.Tensor]) -> torch.Tensor | None:
    """One bool beside the tensors, of any floating types, by the largest magnitude of each; None if
    they have no elements. Waits for nothing. (What torch's GradScaler uses lacks bfloat16.)"""
    by_dtype: dict[torch.dtype, list[torch.Tensor]] = {}
    for tensor in tensors:
        if tensor.numel() > 0:
            by_dtype.setdefault(tensor.dtype, []).append(tensor.detach())
    if not by_dtype:
        return None
    largest = [torch._foreach_norm(of_one, float("inf")) for of_one in by_dtype.values()]
    return (~torch.stack([m.float() for of_one in largest for m in of_one]).isfinite()).any()
