"""Sums of weighted rows in plain torch: the oracle of the kernels, and what runs without them."""

from __future__ import annotations

from torch import Tensor

from gact_graph.ops.checks import check_edges, check_matrix, check_places, check_range, check_tensor
from gact_graph.ops.reference.edges import owners_of


def weighted_sum(
    out: Tensor,
    x: Tensor,
    places: Tensor | None,
    weight: Tensor,
    weight_places: Tensor | None,
    starts: Tensor,
) -> None:
    edges = check_sum(out, x, places, weight, weight_places, starts)
    of_edges = x if places is None else x.index_select(0, places)
    owners = owners_of(starts, edges)
    out.zero_().index_add_(0, owners, _times(of_edges, _weights(weight, weight_places)))


def weighted_sum_weights(
    gradient: Tensor, x: Tensor, places: Tensor | None, starts: Tensor, heads: int
) -> Tensor:
    edges = check_weights(gradient, x, places, starts, heads)
    of_edges = x if places is None else x.index_select(0, places)
    product = gradient.index_select(0, owners_of(starts, edges)).mul_(of_edges)
    return product.view(edges, heads, x.size(1) // heads).sum(-1)


def weighted_sum_backward(
    of_x: Tensor,
    of_weight: Tensor,
    gradient: Tensor,
    x: Tensor,
    places: Tensor,
    weight: Tensor,
    weight_places: Tensor,
    starts: Tensor,
) -> None:
    edges = check_backward(of_x, of_weight, gradient, x, places, weight, weight_places, starts)
    owners, of_edges = owners_of(starts, edges), gradient.index_select(0, places)
    of_x.zero_().index_add_(0, owners, _times(of_edges, _weights(weight, weight_places)))
    heads, width = weight.size(1), x.size(1)
    product = of_edges.mul_(x.index_select(0, owners)).view(edges, heads, width // heads)
    of_weight.index_copy_(0, weight_places.long(), product.sum(-1))


def check_sum(
    out: Tensor,
    x: Tensor,
    places: Tensor | None,
    weight: Tensor,
    weight_places: Tensor | None,
    starts: Tensor,
) -> int:
    """Raises unless these are what :func:`weighted_sum` takes; returns the number of edges."""
    check_matrix("x", x, None, x.device)
    edges = x.size(0) if places is None else places.numel()
    rows = check_edges(places, starts, edges, x.device)
    _check_weight(x, weight, weight_places, edges)
    check_tensor("out", out, x.dtype, [rows, x.size(1)], x.device)
    if places is not None:
        check_range("places", places, x.size(0) - 1)
    return edges


def check_weights(
    gradient: Tensor, x: Tensor, places: Tensor | None, starts: Tensor, heads: int
) -> int:
    """The same for :func:`weighted_sum_weights`."""
    check_matrix("x", x, heads, x.device)
    edges = x.size(0) if places is None else places.numel()
    rows = check_edges(places, starts, edges, x.device)
    check_tensor("gradient", gradient, x.dtype, [rows, x.size(1)], x.device)
    if places is not None:
        check_range("places", places, x.size(0) - 1)
    return edges


def check_backward(
    of_x: Tensor,
    of_weight: Tensor,
    gradient: Tensor,
    x: Tensor,
    places: Tensor,
    weight: Tensor,
    weight_places: Tensor,
    starts: Tensor,
) -> int:
    """The same for :func:`weighted_sum_backward`."""
    check_matrix("x", x, None, x.device)
    edges, width = places.numel(), x.size(1)
    rows = check_edges(places, starts, edges, x.device)
    _check_weight(x, weight, weight_places, edges)
    check_matrix("gradient", gradient, None, x.device)
    check_tensor("gradient", gradient, x.dtype, [gradient.size(0), width], x.device)
    check_tensor("x", x, x.dtype, [rows, width], x.device)
    check_tensor("of_x", of_x, x.dtype, [rows, width], x.device)
    check_tensor("of_weight", of_weight, x.dtype, [*weight.shape], x.device)
    check_range("places", places, gradient.size(0) - 1)
    return edges


def _check_weight(x: Tensor, weight: Tensor, places: Tensor | None, edges: int) -> None:
    check_matrix("weight", weight, None, x.device)
    check_matrix("x", x, weight.size(1), x.device)
    rows = edges if places is None else weight.size(0)
    check_tensor("weight", weight, x.dtype, [rows, weight.size(1)], x.device)
    if places is not None:
        check_places("weight_places", places, edges, x.device)
        check_range("weight_places", places, weight.size(0) - 1)


def _weights(weight: Tensor, places: Tensor | None) -> Tensor:
    return weight if places is None else weight.index_select(0, places)


def _times(rows: Tensor, weight: Tensor) -> Tensor:
    edges, heads = weight.shape
    each = rows.size(1) // heads
    return (rows.view(edges, heads, each) * weight.unsqueeze(-1)).view(edges, rows.size(1))
