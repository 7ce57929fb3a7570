"""Narrow states in torch operations against the core's own conversions."""

import pytest
import torch

from adam_cases import equal_bits
from stepgraph import _core, state_formats
from stepgraph.state_formats import (
    decode_block_scaled,
    encode_block_scaled,
    join_remainder,
    scale_count,
    split_master,
)

DTYPES = [torch.float16, torch.uint8, torch.float8_e4m3fn]


def hard_values(numel, second_moment):
    """Normal values, and blocks with subnormals, zeros, one huge element, infinities and NaN."""
    torch.manual_seed(numel)
    values = torch.randn(numel) * torch.logspace(-38, 38, numel)
    if numel > 300:
        values[:128] = 0
        values[130] = float("inf")
        values[140] = float("nan")
        values[256:300] *= 1e-30
        values[290] = 1e38
    return values.abs() if second_moment else values


def core_encoded(values, dtype, second_moment):
    stored = torch.zeros(values.numel(), dtype=dtype)
    scales = torch.zeros(scale_count(values.numel()), dtype=torch.uint8)
    format = "f16" if dtype is torch.float16 else "e4m3"
    _core.encode_block_scaled(
        values.data_ptr(),
        values.numel(),
        format,
        second_moment,
        stored.data_ptr(),
        scales.data_ptr(),
    )
    decoded = torch.zeros_like(values)
    _core.decode_block_scaled(
        stored.data_ptr(),
        scales.data_ptr(),
        values.numel(),
        format,
        second_moment,
        decoded.data_ptr(),
    )
    return stored, scales, decoded


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("second_moment", [False, True])
@pytest.mark.parametrize("numel", [1, 127, 128, 129, 5000])
def test_the_bits_of_the_core(device, dtype, second_moment, numel):
    values = hard_values(numel, second_moment)
    expected, expected_scales, decoded = core_encoded(values, dtype, second_moment)
    stored = torch.zeros(numel, dtype=dtype, device=device)
    scales = torch.zeros(scale_count(numel), dtype=torch.uint8, device=device)
    encode_block_scaled(values.to(device), stored, scales, second_moment)
    assert torch.equal(scales.cpu(), expected_scales)
    finite = ~values.isnan()  # payloads of a NaN are the processor's own
    assert torch.equal(
        stored.cpu().view(torch.int16 if dtype is torch.float16 else torch.uint8)[finite],
        expected.view(torch.int16 if dtype is torch.float16 else torch.uint8)[finite],
    )
    again = decode_block_scaled(stored, scales, second_moment).cpu()
    torch.testing.assert_close(again, decoded, rtol=0, atol=0, equal_nan=True)


def test_slices_do_not_show(device, monkeypatch):
    values = hard_values(5000, False)
    whole = torch.zeros(5000, dtype=torch.uint8)
    scales = torch.zeros(scale_count(5000), dtype=torch.uint8)
    encode_block_scaled(values, whole, scales, False)
    monkeypatch.setattr(state_formats, "_SLICE", 256)
    parts = torch.zeros(5000, dtype=torch.uint8, device=device)
    part_scales = torch.zeros(scale_count(5000), dtype=torch.uint8, device=device)
    encode_block_scaled(values.to(device), parts, part_scales, False)
    assert torch.equal(parts.cpu(), whole) and torch.equal(part_scales.cpu(), scales)


@pytest.mark.parametrize("dtype", DTYPES)
def test_layouts_are_those_of_memory(device, dtype):
    values = torch.randn(2, 3, 5, 7, device=device).to(memory_format=torch.channels_last)
    stored = torch.zeros_like(values, dtype=dtype)
    scales = torch.zeros(scale_count(values.numel()), dtype=torch.uint8, device=device)
    encode_block_scaled(values, stored, scales, False)
    decoded = decode_block_scaled(stored, scales, False)
    assert decoded.stride() == values.stride()
    torch.testing.assert_close(decoded, values, rtol=0.07, atol=0.02)


def test_remainders_are_lossless(device):
    torch.manual_seed(0)
    every = torch.randint(-(2**31), 2**31 - 1, (20000,), dtype=torch.int32, device=device)
    every[:6] = torch.tensor([0, -1, 0x7FFFFFFF, -(2**31), 0x7F800000, 0x3F808000])
    master = every.view(torch.float32)
    parameter = torch.empty(20000, dtype=torch.bfloat16, device=device)
    remainder = torch.empty(20000, dtype=torch.int16, device=device)
    split_master(master, parameter, remainder)
    assert equal_bits(join_remainder(parameter, remainder), master)
    finite = master.isfinite() & (master.abs() < 3e38)
    error = (parameter.double() - master.double()).abs()[finite]
    assert (error <= master.double().abs()[finite] * 2**-8 + 1e-40).all()
