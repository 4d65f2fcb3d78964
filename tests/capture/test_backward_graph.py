"""What a traced backward reads of a saved tensor, by its operations."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, fx
from torch.fx.experimental.proxy_tensor import make_fx

from gact_graph.capture.backward_graph import has_factor_by_column, is_index_in, reads_in
from gact_graph.codecs.reads import EXACT, Values

N = 6
INDEX = torch.tensor([0, 2, 2, 5, 1, 1])
Backward = Callable[[Tensor, Tensor], Tensor]


def drawn(number: int) -> Tensor:
    return torch.randn(N, N, generator=torch.Generator().manual_seed(number)).double()


def graph_of(backward: Backward, saved: Tensor) -> fx.Graph:
    return make_fx(backward)(saved, drawn(1)).graph


AFFINE: dict[str, Backward] = {
    "matrix product": lambda x, g: x.t() @ g,
    "batched product": lambda x, g: torch.bmm(x.view(2, 3, N), g.view(2, N, 3)),
    "product and sum": lambda x, g: (x * g).sum(0, keepdim=True) + x.mean(),
    "difference": lambda x, g: (x - x.sum()) * g,
    "numerator": lambda x, g: x / g,
    "views": lambda x, g: x.t().reshape(4, 9)[1:].unsqueeze(0).expand(2, 3, 9) * 2,
    "choice": lambda x, g: torch.where(g > 0, x, g),
    "rows": lambda x, g: x[INDEX] * g,
    "rows added": lambda x, g: g.index_add(0, INDEX, x),
    "rows scattered": lambda x, g: g.scatter_add(0, INDEX.view(-1, 1).expand(-1, N), x),
    "rows put": lambda x, g: torch.zeros_like(g).index_put((INDEX,), x, accumulate=True),
    "another type": lambda x, g: x.float() * g.float(),
    "parts": lambda x, g: torch.cat([x.split(3)[1], g]),
    "unused": lambda x, g: g * 2,
}
SQUARES: dict[str, Backward] = {
    "square": lambda x, g: x * x * g,
    "power of two": lambda x, g: x.pow(2) * g,
    "normalization": lambda x, g: x * (x * g).sum(0),
}
OTHERS: dict[str, Backward] = {
    "comparison": lambda x, g: (x > 0) * g,
    "choice by comparison": lambda x, g: torch.where(x > 0, g, 0 * g),
    "denominator": lambda x, g: g / x,
    "cube": lambda x, g: x * x * x * g,
    "power of three": lambda x, g: x.pow(3) * g,
    "logarithm": lambda x, g: x.abs().log() * g,
    "maximum": lambda x, g: x.amax(0) * g,
    "index": lambda x, g: g[x.long() % N],
    "quotient rounded down": lambda x, g: torch.div(x, 3, rounding_mode="floor") * g,
    "quotient rounded to zero": lambda x, g: torch.div(x, g, rounding_mode="trunc"),
    "integers": lambda x, g: x.long().double() * g,
    "truth values": lambda x, g: x.bool().double() * g,
    "bits": lambda x, g: x.view(torch.int64).double() * g,
    "bits of another type": lambda x, g: x.view(torch.float32).sum() * g,
    "sine of a square": lambda x, g: (x * x).sin() * g,
}


@pytest.mark.parametrize("name", AFFINE)
def test_affine_functions_read_values(name: str) -> None:
    backward, x, e = AFFINE[name], drawn(2), drawn(3)
    assert reads_in(graph_of(backward, x), "x_1") == Values()
    mean = (backward(x + e, drawn(1)) + backward(x - e, drawn(1))) / 2
    torch.testing.assert_close(mean, backward(x, drawn(1)))  # noise of mean zero does no harm


@pytest.mark.parametrize("name", SQUARES)
def test_squares_need_four_bits(name: str) -> None:
    assert reads_in(graph_of(SQUARES[name], drawn(2)), "x_1") == Values(least_bits=4)


@pytest.mark.parametrize("name", OTHERS)
def test_other_functions_read_the_exact_tensor(name: str) -> None:
    assert reads_in(graph_of(OTHERS[name], drawn(2)), "x_1") == EXACT


def test_exponentials() -> None:
    assert reads_in(graph_of(lambda x, g: x.exp() * g, drawn(2)), "x_1") == Values(least_bits=16)
    gelu: Backward = lambda x, g: ((x * x * -0.5).exp() * x + torch.erf(x * 0.7)) * g  # noqa: E731
    found = reads_in(graph_of(gelu, drawn(2)), "x_1")
    assert isinstance(found, Values) and found.least_bits <= 4


INDICES: dict[str, tuple[Backward, bool]] = {
    "rows": (lambda i, g: g[i], True),
    "rows of a view": (lambda i, g: g[i.view(2, 3)], True),
    "gather": (lambda i, g: g.gather(0, i.view(-1, 1).expand(-1, N)), True),
    "scatter": (lambda i, g: g.scatter_add(0, i.view(-1, 1).expand(-1, N), g), True),
    "put": (lambda i, g: torch.zeros_like(g).index_put((i,), g, accumulate=True), True),
    "computed": (lambda i, g: g[i + 1 - 1], False),
    "value": (lambda i, g: i.double() * g, False),
    "index and value": (lambda i, g: g[i] + i.view(-1, 1), False),
    "returned": (lambda i, g: i, False),
}


@pytest.mark.parametrize("name", INDICES)
def test_an_index_is_used_as_nothing_else(name: str) -> None:
    backward, expected = INDICES[name]
    traced = make_fx(backward)(INDEX, drawn(1)).graph
    assert is_index_in(traced, "i_1") is expected


def test_an_index_into_more_elements_than_32_bits_number_is_kept() -> None:
    for size, expected in ((1 << 31, False), (1 << 20, True)):
        many = torch.empty(size, dtype=torch.int8, device="meta")
        traced = make_fx(lambda i, g: g[i])(INDEX.to("meta"), many).graph
        assert is_index_in(traced, "i_1") is expected


BY_COLUMN: dict[str, tuple[Backward, bool]] = {
    "difference": (lambda x, g: (x - g[0]) * g, True),
    "difference of a matrix": (lambda x, g: (x - g[:1]) * g, True),
    "product": (lambda x, g: x * g.sum(0, keepdim=True), True),
    "sum": (lambda x, g: x + g[0], True),
    "numbers of rows": (lambda x, g: (x - g[:, :1]) * g, False),
    "all numbers": (lambda x, g: x * g, False),
    "one number": (lambda x, g: x * g.sum() * 2, False),
    "of another tensor": (lambda x, g: (g - g[0]) * x, False),
    "matrix product": (lambda x, g: x.t() @ g, False),
}


@pytest.mark.parametrize("name", BY_COLUMN)
def test_columns_have_factors_of_their_own(name: str) -> None:
    backward, expected = BY_COLUMN[name]
    assert has_factor_by_column(graph_of(backward, drawn(2)), "x_1") is expected
