"""Every build of ``masked_select`` and ``masked_scatter``, and the reference, against indexing."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from cpu_builds import BUILDS, build
from grids import grid
from hypothesis import given, settings
from hypothesis import strategies as st
from kernel_errors import VALUE_ERROR
from quantizer_samples import DTYPES, same_bytes
from torch import Tensor

from gact_graph.ops.bitmask import masked_scatter, masked_select, pack_bits
from gact_graph.ops.reference import bitmask as reference

# Parts of words, and parts and several of the 512 words of a thread's task.
SIZES = (0, 1, 63, 64, 65, 1000, 64 * 512, 64 * 512 * 3 + 77)


@pytest.fixture(scope="module", params=["reference", *BUILDS])
def backend(request: pytest.FixtureRequest) -> Any:
    return reference if request.param == "reference" else build(request.param)


def _sample(size: int, dtype: torch.dtype, share: float = 0.4) -> tuple[Tensor, Tensor]:
    """Values with NaN, Inf and -0 where a mask has bits, and the mask."""
    generator = torch.Generator().manual_seed(size)
    mask = torch.rand(size, generator=generator) < share
    x = torch.randn(size, generator=generator)
    x[::7], x[1::7], x[2::7] = math.nan, -math.inf, -0.0
    return torch.where(mask, x, 0).to(dtype), mask


@pytest.mark.parametrize(("dtype", "size"), grid(DTYPES, SIZES), ids=str)
@pytest.mark.parametrize("share", [0.0, 0.4, 1.0])
def test_both_are_those_of_indexing(
    share: float, dtype: torch.dtype, size: int, backend: Any
) -> None:
    x, mask = _sample(size, dtype, share)
    words = pack_bits(mask)
    values, others_are_zero = backend.masked_select(x, words, False)
    assert bool(others_are_zero) and same_bytes(values, x[mask])
    assert same_bytes(backend.masked_scatter(values, words, size), x)


@pytest.mark.parametrize("size", [65, 1000, 64 * 512 * 3 + 77])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    ("other", "negative"),
    [(-0.0, False), (6e-8, True), (-6e-8, True), (math.nan, True), (-math.inf, False)],
)
def test_any_other_element_that_is_not_zero_is_found(
    other: float, negative: bool, dtype: torch.dtype, size: int, backend: Any
) -> None:
    x, mask = _sample(size, dtype)
    places = (~mask).nonzero().view(-1)
    for place in (places[0], places[len(places) // 2], places[-1]):
        changed = x.clone()
        changed[place] = other
        values, others_are_zero = backend.masked_select(changed, pack_bits(mask), negative)
        assert not others_are_zero and same_bytes(values, x[mask])


def test_negative_zeros_may_count_as_zeros(backend: Any) -> None:
    x, mask = _sample(64 * 512 + 70, torch.float32)
    x[~mask] = -0.0
    assert backend.masked_select(x, pack_bits(mask), True)[1]
    assert not backend.masked_select(x, pack_bits(mask), False)[1]


def test_bits_after_the_last_element_are_not_read(backend: Any) -> None:
    x, words = torch.arange(1.0, 71.0), torch.full((2,), -1)
    values, others_are_zero = backend.masked_select(x, words, False)
    if backend is not reference:  # which makes no tensor of the mask
        assert others_are_zero
    assert torch.equal(values, x) and torch.equal(backend.masked_scatter(x, words, 70), x)


def test_strides_and_gradients_do_not_matter() -> None:
    x, mask = _sample(600, torch.float32)
    turned = x.view(30, 20).t().requires_grad_()
    values, others_are_zero = masked_select(turned, pack_bits(mask.view(30, 20).t()))
    assert others_are_zero and not values.requires_grad
    assert same_bytes(values, turned.detach()[mask.view(30, 20).t()])
    gaps = torch.stack([pack_bits(mask)] * 2, 1)[:, 0]
    spread = torch.stack([x[mask]] * 2, 1)[:, 0]
    assert same_bytes(masked_scatter(spread, gaps, 600), x)


@settings(max_examples=60)
@given(st.integers(0, 300), st.floats(0, 1), st.sampled_from(DTYPES), st.integers(1, 3))
def test_any_size_share_and_number_of_threads(
    size: int, share: float, dtype: torch.dtype, threads: int
) -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        x, mask = _sample(size * 331, dtype, share)
        values, others_are_zero = masked_select(x, pack_bits(mask))
        assert others_are_zero and same_bytes(values, x[mask])
        assert same_bytes(masked_scatter(values, pack_bits(mask), len(x)), x)
    finally:
        torch.set_num_threads(before)


_WORDS = torch.tensor([7])


@pytest.mark.parametrize("name", ["reference", *BUILDS])
def test_arguments_that_do_not_fit(name: str) -> None:
    ops = reference if name == "reference" else build(name)
    with pytest.raises(VALUE_ERROR, match=r"Expected words of \[2\], contiguous \(got \[1\]\)"):
        ops.masked_select(torch.ones(65), _WORDS, False)
    with pytest.raises(VALUE_ERROR, match=r"Expected x to be floating-point \(got"):
        ops.masked_select(torch.ones(3).long(), _WORDS, False)
    with pytest.raises(VALUE_ERROR, match=r"for each bit that is set: 3 \(got 2\)"):
        ops.masked_scatter(torch.ones(2), _WORDS, 64)
    with pytest.raises(VALUE_ERROR, match=r"for each bit that is set: 2 \(got 3\)"):
        ops.masked_scatter(torch.ones(3), _WORDS, 2)
    with pytest.raises(VALUE_ERROR, match="Expected a real dtype"):
        ops.masked_scatter(torch.ones(3).to(torch.complex64), _WORDS, 64)
