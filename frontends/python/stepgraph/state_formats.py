"""Narrow states in torch operations: f32 to what is stored and back, with the bits of the core.

The formats are described in docs/numerics.md: float16 and 8-bit states are scaled in blocks of 128
consecutive elements by a power of two that is kept as one byte, second moments of those formats are
kept as square roots, and a remainder completes a bfloat16 parameter to the float32 master.

All functions work on dense tensors of any device, in memory order (not in the order of indices),
enqueue on the current stream and never synchronise. Scratch memory is bounded by a few slices of
`_SLICE` elements.
"""

from __future__ import annotations

import torch

BLOCK = 128
"""Elements that share a scale."""

_SLICE = 1 << 24
"""Elements that one round of encoding works on: a multiple of BLOCK."""

_SMALLEST_SQUARE = 2.0**-101
"""Second moments below have the root of this (kernels/include/stepgraph/math/adam.hpp)."""

# Biased exponent and mantissa bits, in float32, of the largest value, and the smallest value.
_E4M3 = (8, 0x600000, 2.0**-9, 448.0)
_F16 = (15, 0x7FE000, 2.0**-24, float("inf"))


def scale_count(numel: int) -> int:
    """Scale bytes of a block-scaled tensor."""
    return -(-numel // BLOCK)


def is_block_scaled(dtype: torch.dtype) -> bool:
    """Whether a state of this stored dtype has block scales."""
    return dtype in (torch.float16, torch.uint8, torch.float8_e4m3fn)


def flat_memory(tensor: torch.Tensor) -> torch.Tensor:
    """The elements of a dense tensor in the order of their addresses, as a view."""
    if tensor.is_contiguous():
        return tensor.detach().view(-1)
    return tensor.detach().as_strided((tensor.numel(),), (1,), tensor.storage_offset())


def encode_block_scaled(
    values: torch.Tensor, stored: torch.Tensor, scales: torch.Tensor, second_moment: bool
) -> None:
    """Stores float32 `values` into `stored` (float16, uint8 or float8_e4m3fn) and `scales` (uint8,
    one for each 128 elements), in place."""
    source, target = flat_memory(values), flat_memory(stored)
    if target.dtype is torch.float8_e4m3fn:
        target = target.view(torch.uint8)
    for first in range(0, source.numel(), _SLICE):
        part = slice(first, min(first + _SLICE, source.numel()))
        blocks = slice(first // BLOCK, scale_count(part.stop))
        _encode_slice(source[part], target[part], scales[blocks], second_moment)


def _encode_slice(
    values: torch.Tensor, stored: torch.Tensor, scales: torch.Tensor, second_moment: bool
) -> None:
    numel = values.numel()
    padded = values.new_zeros(scales.numel() * BLOCK)
    padded[:numel] = values
    if second_moment:
        roots = padded.clamp(min=_SMALLEST_SQUARE).sqrt_()
        padded = torch.where(padded > 0, roots, torch.zeros_like(padded))
    blocks = padded.view(-1, BLOCK)
    top_exponent, top_mantissa, smallest, largest = _F16 if stored.dtype is torch.float16 else _E4M3

    # A NaN does not count towards the largest magnitude.
    magnitudes = blocks.abs()
    magnitudes.masked_fill_(magnitudes.isnan(), 0.0)
    bits = magnitudes.amax(dim=1).view(torch.int32)
    raised = (bits >> 23) + ((bits & 0x7FFFFF) > top_mantissa).to(torch.int32)
    exponents = (raised - top_exponent).clamp_(1, 253)
    scales.copy_(exponents)

    scaled = blocks * ((254 - exponents) << 23).view(torch.float32).unsqueeze(1)
    if second_moment:
        scaled = torch.where(blocks > 0, scaled.clamp(min=smallest), torch.zeros_like(scaled))
    scaled = scaled.view(-1)[:numel]
    if stored.dtype is torch.float16:
        stored.copy_(scaled)
        return
    encoded = scaled.clamp(-largest, largest).to(torch.float8_e4m3fn).view(torch.uint8)
    stored.copy_(encoded.masked_fill_(scaled.isnan(), 0x7F))


def decode_block_scaled(
    stored: torch.Tensor, scales: torch.Tensor, second_moment: bool
) -> torch.Tensor:
    """What `encode_block_scaled` stored, as a new float32 tensor of the same layout."""
    values = torch.empty_like(stored, dtype=torch.float32)
    source, target = flat_memory(stored), flat_memory(values)
    if source.dtype is torch.uint8:
        source = source.view(torch.float8_e4m3fn)
    target.copy_(source)
    factors = (scales.to(torch.int32) << 23).view(torch.float32)
    whole = target.numel() // BLOCK * BLOCK
    target[:whole].view(-1, BLOCK).mul_(factors[: whole // BLOCK].unsqueeze(1))
    if whole < target.numel():
        target[whole:].mul_(factors[-1])
    return values.square_() if second_moment else values


def join_remainder(parameter: torch.Tensor, remainder: torch.Tensor) -> torch.Tensor:
    """The float32 master of a bfloat16 parameter and its int16 remainder, as a new tensor of the
    parameter's layout."""
    master = torch.empty_like(parameter, dtype=torch.float32)
    high = flat_memory(parameter).view(torch.int16).to(torch.int32) << 16
    flat_memory(master).view(torch.int32).copy_(high.add_(flat_memory(remainder)))
    return master


def split_master(master: torch.Tensor, parameter: torch.Tensor, remainder: torch.Tensor) -> None:
    """Stores a float32 master as bfloat16 `parameter` and int16 `remainder`, in place: the inverse
    of `join_remainder`, for every bit pattern."""
    bits = flat_memory(master).view(torch.int32)
    flat_memory(remainder).copy_((bits << 16) >> 16)
    flat_memory(parameter).view(torch.int16).copy_((bits + 0x8000) >> 16)
