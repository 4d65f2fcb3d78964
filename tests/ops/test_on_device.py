"""The operators on a GPU beside the pure-torch reference on the CPU, byte for byte."""

from __future__ import annotations

import math
from collections.abc import Iterator

import pytest
import torch
from quantizer_samples import DEVICES, DTYPES, SAMPLES, Sample, normal, same_bytes
from torch import Tensor

import gact_graph.ops.bitmask  # noqa: F401  defines operators
from gact_graph.ops.quantize import Widths
from gact_graph.ops.reference import bitmask as bitmask_reference
from gact_graph.ops.reference import quantize as reference

WIDTHS = (*range(1, 9), 16)
# Every group size and every seed with every width, but not each with each.
GROUPS_AND_SEEDS = ((64, 0), (256, -1), (1024, 12345))
SIZES = (0, 1, 63, 65, 257, 1000, 100_003)
ROWS = (64, 200)
"""Elements of a row, where some rows of a tensor are decoded."""

LARGE = (1 << 31) + 1000
"""Elements that a 32-bit number cannot count; as bfloat16 4.3 GB."""

OPS = torch.ops.gact_graph

on_a_device = pytest.mark.parametrize("device", DEVICES[1:])


@on_a_device
@pytest.mark.parametrize("sample", SAMPLES, ids=str)
def test_quantizer(sample: Sample, device: str) -> None:
    x = sample.tensor()
    for bits in WIDTHS:
        for group, seed in GROUPS_AND_SEEDS:
            codes, stats = reference.pack(x, bits, group, seed)
            y = reference.unpack(codes, stats, list(x.shape), bits, group, x.dtype)
            # What is not contiguous is the operator's own matter.
            found_codes, found_stats = OPS.pack(x.to(device), bits, group, seed)
            actual = OPS.unpack(found_codes, found_stats, x.shape, bits, group, x.dtype)
            assert same_bytes(found_codes.cpu(), codes), (bits, group)
            assert same_bytes(found_stats.cpu().view(torch.int16), stats.view(torch.int16))
            assert same_bytes(actual.cpu(), y), (bits, group)
            assert actual.device == found_codes.device == found_stats.device
            assert actual.device.type == torch.device(device).type


@on_a_device
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_widths_of_groups(dtype: torch.dtype, device: str) -> None:
    x = normal(100_003, dtype)
    x[300:600], x[-1] = 0.1, math.inf
    rows = torch.arange(500).flip(0)[::3]
    for group, seed in GROUPS_AND_SEEDS:
        draw = (torch.arange(-(-x.numel() // group)) % 16 + 1).byte()
        own = Widths.of(draw.to(device), x.numel(), group)
        codes, stats = reference.pack(x, 4, group, seed, draw, own.words)
        found_codes, found_stats = OPS.pack(x.to(device), 4, group, seed, own.widths, own.words)
        assert same_bytes(found_codes.cpu(), codes) and same_bytes(found_stats.cpu(), stats)
        exact = reference.exact_groups(x, stats, group)
        found_exact = [tensor.to(device) for tensor in exact]
        for again in (None, seed):
            how = 4, group, dtype, *exact, again, draw
            y = reference.unpack(codes, stats, list(x.shape), *how)
            found = 4, group, dtype, *found_exact, again, own.widths
            actual = OPS.unpack(found_codes, found_stats, x.shape, *found)
            assert same_bytes(actual.cpu(), y), (group, again)
            coded = found_codes, found_stats, rows.to(device)
            actual = OPS.unpack_rows(*coded, x.numel(), 200, *found)
            assert same_bytes(actual.cpu(), y[:100_000].view(500, 200)[rows]), (group, again)


@on_a_device
@pytest.mark.parametrize("width", ROWS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_rows(dtype: torch.dtype, width: int, device: str) -> None:
    x = normal(100_003, dtype)
    count = x.numel() // width
    rows = torch.arange(count).flip(0)[::3]
    for bits in WIDTHS:
        codes, stats = reference.pack(x, bits, 256, 7)
        y = reference.unpack(codes, stats, list(x.shape), bits, 256, dtype)
        coded = codes.to(device), stats.to(device), rows.to(device)
        actual = OPS.unpack_rows(*coded, x.numel(), width, bits, 256, dtype)
        assert same_bytes(actual.cpu(), y[: count * width].view(count, width)[rows]), bits


def thresholds(dtype: torch.dtype) -> Iterator[tuple[int, float]]:
    yield 0, 0.0
    if dtype.is_floating_point:
        yield from ((test, at) for test in (1, 2) for at in (0.0, 0.1, math.inf))


@on_a_device
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("dtype", [*DTYPES, torch.bool, torch.uint8, torch.int64], ids=str)
def test_masks(dtype: torch.dtype, size: int, device: str) -> None:
    x = normal(size, torch.float32)
    x[::7], x[3::7] = 0.0, math.nan
    x = x.to(dtype) if dtype.is_floating_point else (x > 0).to(dtype)
    for test, threshold in thresholds(dtype):
        words = bitmask_reference.pack_bits(x, test, threshold)
        y = bitmask_reference.unpack_bits(words, list(x.shape), 0.0, 1.0, dtype)
        actual = OPS.pack_bits(x.to(device), test, threshold)
        assert same_bytes(actual.cpu(), words), (test, threshold)
        assert same_bytes(OPS.unpack_bits(actual, x.shape, 0.0, 1.0, dtype).cpu(), y)


@on_a_device
@pytest.mark.parametrize("stranger", [False, True])
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_pairs(dtype: torch.dtype, size: int, stranger: bool, device: str) -> None:
    """Tensors of two values; a third value is reported, and the words mean nothing."""
    x = torch.zeros(size, dtype=dtype)
    x[1::3] = 1.25
    if stranger and size:
        x[size - 1] = -0.0
    words, matched = bitmask_reference.pack_pair(x, 0.0, 1.25)
    actual, found_matched = OPS.pack_pair(x.to(device), 0.0, 1.25)
    assert bool(found_matched) == bool(matched) == (not stranger or size == 0)
    if matched:
        y = bitmask_reference.unpack_bits(words, [size], 0.0, 1.25, dtype)
        assert same_bytes(actual.cpu(), words)
        assert same_bytes(OPS.unpack_bits(actual, [size], 0.0, 1.25, dtype).cpu(), y)


@on_a_device
def test_more_elements_than_32_bits_count(device: str) -> None:
    # The reference works on the device here, for on the CPU it would take minutes.
    period = 1 << 20
    x = normal(period, torch.bfloat16).to(device).repeat(-(-LARGE // period))[:LARGE]
    codes, stats = OPS.pack(x, 2, 256, 7)
    expected: tuple[Tensor, Tensor] = reference.pack(x, 2, 256, 7)
    assert torch.equal(codes, expected[0]) and torch.equal(stats, expected[1])
    y = OPS.unpack(codes, stats, [LARGE], 2, 256, x.dtype)
    assert torch.equal(y, reference.unpack(codes, stats, [LARGE], 2, 256, x.dtype))
    del y, codes, expected
    words = OPS.pack_bits(x, 1, 0.0)
    assert torch.equal(words, bitmask_reference.pack_bits(x, 1, 0.0))
