"""Squares of tangents, without what one draw of signs adds."""

from __future__ import annotations

import pytest
import torch

from gact_graph.adaptive.tangents import SAMPLES, Tangent


def drawn(rows, columns, samples=None):
    """A tangent whose elements have a factor of their row and one of their column, and the exact
    mean squares [S]."""
    generator = torch.Generator().manual_seed(0)

    def factors(*shape):
        return torch.randn(shape, generator=generator).exp()

    means = (factors(rows, 1) * factors(1, columns)).flatten()
    values = means.sqrt() * torch.randn(means.shape, generator=generator)
    shape = torch.Size([rows, columns])
    if samples is None:
        return Tangent(None, values, shape), means
    indices = torch.randint(rows * columns, (samples,), generator=generator)
    return Tangent(indices, values[indices], shape), means[indices]


def spread(squares, means):
    return (squares / means).log().std()


@pytest.mark.parametrize("samples", [None, SAMPLES])
def test_squares_have_the_factors_of_rows_and_columns(samples):
    tangent, means = drawn(1000, 64, samples)
    assert spread(tangent.values.square(), means) > 2
    assert spread(tangent.squares, means) < 0.6
    assert tangent.squares.sum() == pytest.approx(means.sum().item(), rel=0.1)


def test_rows_with_few_samples_have_no_factor():
    tangent, _ = drawn(20_000, 64, 10_000)
    assert torch.equal(tangent.squares, tangent.values.square())


@pytest.mark.parametrize("shape", [(), (5,), (5, 1), (0, 3), (3, 0), (2, 3, 4)])
def test_any_shape(shape):
    values = torch.randn(torch.Size(shape).numel())
    squares = Tangent(None, values, torch.Size(shape)).squares
    assert squares.shape == values.shape
    assert squares.sum() == pytest.approx(values.square().sum().item(), rel=1e-5)


def test_no_tangent_at_all():
    assert not Tangent(None, torch.zeros(12), torch.Size([3, 4])).squares.any()
