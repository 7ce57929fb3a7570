"""Remainders that arrive as float32: the numbers of the int16 they are stored as.

Megatron's files of whole buffers hold every state in float32, and of a bfloat16 parameter's master
either the master or its remainder. No file says which, so values and parameter have to.
"""

from __future__ import annotations

import torch

from .state_formats import split_master

_INT16 = torch.iinfo(torch.int16)

LARGEST_LIKELY_INTEGER = 256
"""From here on whole numbers are unlikely as weights, and hardly avoidable among remainders."""


def hold_remainders(values: torch.Tensor, parameter: torch.Tensor) -> bool:
    """Whether float32 `values` are remainders of a bfloat16 `parameter` instead of its master: all
    are integers of 16 bits, and as a master they would not round to the parameter. Zeros for a
    parameter of zeros are the same either way. Both tensors on one device; waits for it."""
    nearest = values.round().clamp_(_INT16.min, _INT16.max)
    return torch.equal(values, nearest) and not _round_to(values, parameter)


def _round_to(master: torch.Tensor, parameter: torch.Tensor) -> bool:
    """Whether each element of `parameter` is the master, rounded to the nearest. Of two neighbours
    that are equally near either will do: the step takes the even one where it keeps whole masters,
    the larger one where it keeps remainders."""
    even = master.to(torch.bfloat16) == parameter
    laid_out = torch.empty_like(parameter, dtype=torch.float32).copy_(master)
    larger = torch.empty_like(parameter)
    split_master(laid_out, larger, torch.empty_like(parameter, dtype=torch.int16))
    return bool((even | (larger == parameter)).all())
