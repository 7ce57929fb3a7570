"""Norms and scaling of lists of tensors, called as those of Transformer Engine and apex are:

    norm, _ = multi_tensor_applier(multi_tensor_l2norm, noop_flag, [gradients], False)
    multi_tensor_applier(multi_tensor_scale, noop_flag, [gradients, gradients], coefficient)

All functions work on the CPU and on CUDA, take f32, f16 and bf16 tensors in one list, empty lists
and empty tensors. They enqueue onto the current stream, wait for nothing and read nothing back, so
they may be captured. Arithmetic is f32, sums of squares are f64. `chunk_size` is not used.

`noop_flag` is one int32 beside the tensors; it becomes 1 where a value is not finite and is
otherwise left alone.

They are made of torch's own multi-tensor operations rather than of a plan and an executor: the
results are new tensors, whose memory inside a capture must belong to the caller's pool, and lists
change from call to call, while a plan pays off for a list that stays. What takes part in a step
needs none of them: see `max_norm` and `skip_non_finite` of `FusedAdam`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor

from ._core import UsageError
from .tensors import any_not_finite

__all__ = [
    "MultiTensorApply",
    "multi_tensor_applier",
    "multi_tensor_l2norm",
    "multi_tensor_scale",
    "multi_tensor_scale_tensor",
    "multi_tensor_unscale_l2norm",
]

_DTYPES = (torch.float32, torch.float16, torch.bfloat16)
_LARGEST_TEMPORARY = 1 << 24
"""Elements. One model's worth at once would stay in the pool of a capture."""
_Key = TypeVar("_Key")


class MultiTensorApply:
    """Calls an operation with the chunk size that it was made with."""

    available = True

    def __init__(self, chunk_size: int) -> None:
        self.chunk_size = chunk_size

    def __call__(
        self,
        op: Callable[..., Any],
        noop_flag_buffer: Tensor,
        tensor_lists: Sequence[Sequence[Tensor]],
        *args: Any,
    ) -> Any:
        return op(self.chunk_size, noop_flag_buffer, tensor_lists, *args)


multi_tensor_applier = MultiTensorApply(2048 * 32)


def multi_tensor_l2norm(
    chunk_size: int,
    noop_flag: Tensor,
    tensor_lists: Sequence[Sequence[Tensor]],
    per_tensor: bool = False,
) -> tuple[Tensor, Tensor]:
    """The L2 norm of all tensors of one list, of shape [1], and of each, of shape [n] (else [0]).

    f32; infinity or NaN, and `noop_flag` 1, if an element is not finite. Squares beyond f32 do not
    overflow.
    """
    (tensors,) = _lists("multi_tensor_l2norm", noop_flag, tensor_lists, 1)
    return _finish_norm(noop_flag, _norms(noop_flag, tensors), per_tensor)


def multi_tensor_unscale_l2norm(
    chunk_size: int,
    noop_flag: Tensor,
    tensor_lists: Sequence[Sequence[Tensor]],
    inv_scale: Tensor,
    per_tensor: bool = False,
) -> tuple[Tensor, Tensor]:
    """`multi_tensor_l2norm` of the tensors times `inv_scale`, one f32 beside them.

    The tensors stay as they are.
    """
    name = "multi_tensor_unscale_l2norm"
    (tensors,) = _lists(name, noop_flag, tensor_lists, 1)
    factor = _scalar(name, "inv_scale", noop_flag, inv_scale)
    norms = _norms(noop_flag, tensors) * factor.abs().to(torch.float64)
    return _finish_norm(noop_flag, norms, per_tensor)


def multi_tensor_scale(
    chunk_size: int,
    noop_flag: Tensor,
    tensor_lists: Sequence[Sequence[Tensor]],
    scale: float,
) -> None:
    """Stores the tensors of the first list times `scale` into those of the second.

    The lists may be the same, and tensors of a pair may have different dtypes; each product is
    rounded once.
    """
    # Megatron-LM copies main parameters to the model so.
    factor = (
        None
        if scale == 1.0
        else torch.full((1,), scale, dtype=torch.float32, device=noop_flag.device)
    )
    _scale("multi_tensor_scale", noop_flag, tensor_lists, factor)


def multi_tensor_scale_tensor(
    chunk_size: int,
    noop_flag: Tensor,
    tensor_lists: Sequence[Sequence[Tensor]],
    scale: Tensor,
) -> None:
    """`multi_tensor_scale` by one f32 beside the tensors, read when the work runs."""
    name = "multi_tensor_scale_tensor"
    _scale(name, noop_flag, tensor_lists, _scalar(name, "scale", noop_flag, scale))


def _lists(
    name: str, noop_flag: Tensor, tensor_lists: Sequence[Sequence[Tensor]], count: int
) -> Sequence[Sequence[Tensor]]:
    """The lists, checked against each other and the flag."""
    if len(tensor_lists) != count:
        raise UsageError(f"{name}: {len(tensor_lists)} lists of tensors, expected {count}")
    if noop_flag.numel() != 1 or noop_flag.dtype != torch.int32:
        raise UsageError(
            f"{name}: noop_flag has {noop_flag.numel()} elements of {noop_flag.dtype}, expected "
            "one of torch.int32"
        )
    device = noop_flag.device
    for tensors in tensor_lists:
        for index, tensor in enumerate(tensors):
            if tensor.dtype not in _DTYPES:
                raise UsageError(
                    f"{name}: tensor {index} is {tensor.dtype}, expected one of {_DTYPES}"
                )
            if tensor.device != device:
                raise UsageError(
                    f"{name}: tensor {index} is on {tensor.device}, expected {device} as noop_flag"
                )
    return tensor_lists


def _scalar(name: str, argument: str, noop_flag: Tensor, value: Tensor) -> Tensor:
    found = f"{value.numel()} elements of {value.dtype} on {value.device}"
    if value.numel() != 1 or value.dtype != torch.float32 or value.device != noop_flag.device:
        raise UsageError(
            f"{name}: {argument} has {found}, expected one of torch.float32 on {noop_flag.device}"
        )
    return value.reshape(1)


def _by(keys: Iterable[_Key]) -> dict[_Key, list[int]]:
    """Indices of equal keys: torch's kernels take one dtype a call."""
    groups: dict[_Key, list[int]] = {}
    for index, key in enumerate(keys):
        groups.setdefault(key, []).append(index)
    return groups


def _raise_flag(noop_flag: Tensor, where: Tensor) -> None:
    noop_flag.masked_fill_(where.any().reshape(noop_flag.shape), 1)


def _norms(noop_flag: Tensor, tensors: Sequence[Tensor]) -> Tensor:
    """Of each tensor, in f64, which holds the square of every finite f32."""
    if not tensors:
        return torch.zeros(0, dtype=torch.float64, device=noop_flag.device)
    groups = _by(tensor.dtype for tensor in tensors)
    norms: list[Tensor | None] = [None] * len(tensors)
    for indices in groups.values():
        found = torch._foreach_norm([tensors[i].detach() for i in indices], 2, dtype=torch.float64)
        for index, norm in zip(indices, found, strict=True):
            norms[index] = norm
    return torch.stack([norm for norm in norms if norm is not None])


def _finish_norm(noop_flag: Tensor, norms: Tensor, per_tensor: bool) -> tuple[Tensor, Tensor]:
    total = torch.linalg.vector_norm(norms).reshape(1).to(torch.float32)
    _raise_flag(noop_flag, ~torch.isfinite(total))
    return total, norms.to(torch.float32) if per_tensor else total.new_empty(0)


@torch.no_grad()
def _scale(
    name: str, noop_flag: Tensor, tensor_lists: Sequence[Sequence[Tensor]], factor: Tensor | None
) -> None:
    """`factor` None: 1, so that nothing needs to be multiplied."""
    inputs, outputs = _lists(name, noop_flag, tensor_lists, 2)
    if len(inputs) != len(outputs):
        raise UsageError(f"{name}: {len(inputs)} inputs and {len(outputs)} outputs")
    for index, (source, target) in enumerate(zip(inputs, outputs, strict=True)):
        if source.shape != target.shape:
            raise UsageError(
                f"{name}: input {index} has shape {tuple(source.shape)}, output {index} "
                f"{tuple(target.shape)}"
            )
    if factor is None:
        not_finite = any_not_finite(inputs)
        if not_finite is not None:
            _raise_flag(noop_flag, not_finite)
    found_inf = torch.zeros(1, dtype=torch.float32, device=noop_flag.device)
    pairs = _by((a.dtype, b.dtype) for a, b in zip(inputs, outputs, strict=True))
    for (from_dtype, to_dtype), indices in pairs.items():
        sources = [inputs[i] for i in indices]
        targets = [outputs[i] for i in indices]
        if factor is None:
            _copy(targets, sources)
        elif to_dtype == torch.float32 or from_dtype == to_dtype == torch.float16:
            _copy(targets, sources)
            # Multiplies and looks for values that are not finite in one pass.
            torch._amp_foreach_non_finite_check_and_unscale_(targets, found_inf, factor)
        else:
            # In place the product would be rounded twice, or overflow before it is scaled; and on
            # CUDA torch's kernel does not know bf16.
            for some_sources, some_targets in _pieces(sources, targets):
                work = [torch.empty_like(t, dtype=torch.float32) for t in some_targets]
                torch._foreach_copy_(work, some_sources)
                torch._amp_foreach_non_finite_check_and_unscale_(work, found_inf, factor)
                torch._foreach_copy_(some_targets, work)
    if factor is not None:
        _raise_flag(noop_flag, found_inf != 0)


def _copy(targets: Sequence[Tensor], sources: Sequence[Tensor]) -> None:
    if not all(a is b for a, b in zip(sources, targets, strict=True)):
        torch._foreach_copy_(list(targets), list(sources))


def _pieces(
    sources: Sequence[Tensor], targets: Sequence[Tensor]
) -> Iterator[tuple[list[Tensor], list[Tensor]]]:
    """The pairs in lists of at most _LARGEST_TEMPORARY elements, larger tensors cut into parts."""
    some: tuple[list[Tensor], list[Tensor]] = ([], [])
    elements = 0
    for source, target in zip(sources, targets, strict=True):
        parts = [(source, target)]
        if (
            target.numel() > _LARGEST_TEMPORARY
            and source.is_contiguous()
            and target.is_contiguous()
        ):
            parts = list(
                zip(
                    source.view(-1).split(_LARGEST_TEMPORARY),
                    target.view(-1).split(_LARGEST_TEMPORARY),
                    strict=True,
                )
            )
        for part in parts:
            if some[0] and elements + part[1].numel() > _LARGEST_TEMPORARY:
                yield some
                some, elements = ([], []), 0
            some[0].append(part[0])
            some[1].append(part[1])
            elements += part[1].numel()
    if some[0]:
        yield some
