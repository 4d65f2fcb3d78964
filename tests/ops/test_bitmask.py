"""One bit an element: the reference against plain torch, the CPU kernels against the reference."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from cpu_builds import build
from hypothesis import given, settings
from hypothesis import strategies as st

from gact_graph.ops import cpu
from gact_graph.ops.bitmask import TESTS, pack_bits, pack_pair, unpack_bits
from gact_graph.ops.reference import bitmask as reference

FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
SIZES = (0, 1, 63, 64, 65, 127, 128, 1000, 40_000)  # the last is more than a thread's share
SPECIAL = (0.0, -0.0, math.nan, math.inf, -math.inf, 0.25, 0.5)


def expected(bits: list[bool]) -> list[int]:
    words = []
    for start in range(0, len(bits), 64):
        word = sum(bit << i for i, bit in enumerate(bits[start : start + 64]))
        words.append(word - (1 << 64) if word >> 63 else word)
    return words


def sample(size: int, dtype: torch.dtype) -> torch.Tensor:
    x = torch.randn(size, generator=torch.Generator().manual_seed(size))
    x[: len(SPECIAL)] = torch.tensor(SPECIAL)[:size]
    return x.to(dtype)


def passes(x: torch.Tensor, test: str, threshold: float) -> torch.Tensor:
    tests = {"nonzero": x != 0, "above": x > threshold, "not_at_most": ~(x <= threshold)}
    return tests[test]


@pytest.fixture(params=["reference", *cpu.VECTOR_FLAGS])
def backend(request: pytest.FixtureRequest) -> Any:
    return reference if request.param == "reference" else build(request.param)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("dtype", FLOATS)
def test_tests(backend, dtype, size):
    x = sample(size, dtype)
    for threshold in (0.0, 0.25):
        for number, test in [(1, "above"), (2, "not_at_most")]:
            words = backend.pack_bits(x, number, threshold)
            assert words.tolist() == expected(passes(x, test, threshold).tolist())


@pytest.mark.parametrize("size", SIZES)
def test_bool(backend, size):
    mask = sample(size, torch.float32) > 0.3
    words = backend.pack_bits(mask, 0, 0.0)
    assert words.tolist() == expected(mask.tolist())
    assert torch.equal(backend.unpack_bits(words, [size], 0.0, 1.0, torch.bool), mask)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("dtype", FLOATS)
def test_pairs(backend, dtype, size):
    mask = sample(size, torch.float32) > 0.3
    x = torch.where(mask, 1.25, 0.0).to(dtype)
    words, matched = backend.pack_pair(x, 0.0, 1.25)
    assert bool(matched)
    assert words.tolist() == expected(mask.tolist())
    assert torch.equal(backend.unpack_bits(words, [size], 0.0, 1.25, dtype), x)
    for third in (0.5, -0.0, math.nan):
        for place in {0, size // 2, size - 1} if size else ():
            y = x.clone()
            y[place] = third
            assert not backend.pack_pair(y, 0.0, 1.25)[1]


@pytest.mark.parametrize("dtype", [*FLOATS, torch.int64, torch.uint8])
def test_unpack_to_any_dtype(backend, dtype):
    mask = torch.arange(130) % 3 == 0
    words = backend.pack_bits(mask, 0, 0.0)
    back = backend.unpack_bits(words, [13, 10], 2.0, 5.0, dtype)
    assert back.dtype == dtype and back.shape == (13, 10) and back.is_contiguous()
    assert torch.equal(back.view(-1), torch.where(mask, 5, 2).to(dtype))


@settings(deadline=None, max_examples=100)
@given(
    st.lists(st.integers(0, 5), min_size=1, max_size=3),
    st.sampled_from([*FLOATS, torch.bool, torch.int32]),
    st.sampled_from(TESTS),
    st.booleans(),
)
def test_any_shape_and_strides(shape, dtype, test, transposed):
    x = torch.randn([2 * n for n in shape]).to(dtype)[tuple(slice(None, None, 2) for _ in shape)]
    x = x.permute(*reversed(range(x.dim()))) if transposed else x
    if test != "nonzero" and not dtype.is_floating_point:
        with pytest.raises(TypeError, match="Expected a floating-point tensor"):
            pack_bits(x, test)
        return
    mask = passes(x, test, 0.0)
    words = pack_bits(x, test)
    assert words.tolist() == expected(mask.flatten().tolist())
    assert torch.equal(unpack_bits(words, x.shape, 0, 1, torch.bool), mask)


def test_bad_input():
    with pytest.raises(ValueError, match=r"Expected test to be one of 'nonzero'.*got 'below'"):
        pack_bits(torch.zeros(3), "below")
    with pytest.raises(TypeError, match=r"Expected a real tensor .*got torch.complex64"):
        pack_bits(torch.zeros(3, dtype=torch.complex64))
    with pytest.raises(TypeError, match=r"Expected a floating-point tensor \(got torch.int64\)"):
        pack_pair(torch.zeros(3, dtype=torch.int64), 0, 1)
    with pytest.raises(ValueError, match=r"Expected 2 words of int64 for shape \[65\]"):
        unpack_bits(torch.zeros(1, dtype=torch.int64), [65], 0, 1, torch.bool)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bool])
def test_operators_are_well_formed(dtype):
    x = sample(100, torch.float32).to(dtype)
    ops = torch.ops.gact_graph
    checks = ("test_schema", "test_faketensor")
    torch.library.opcheck(ops.pack_bits.default, (x, 0, 0.0), test_utils=checks) if (
        dtype == torch.bool
    ) else torch.library.opcheck(ops.pack_pair.default, (x, 0.0, 1.0), test_utils=checks)
    words = torch.zeros(2, dtype=torch.int64)
    torch.library.opcheck(
        ops.unpack_bits.default, (words, [100], 0.0, 1.0, dtype), test_utils=checks
    )
