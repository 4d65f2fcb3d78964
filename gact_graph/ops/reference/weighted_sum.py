"""Sums of weighted rows, in pure torch: see :mod:`gact_graph.ops.weighted_sum`."""

from __future__ import annotations

from torch import Tensor

from gact_graph.ops.checks import check_edges, check_matrix, check_places, check_range, check_tensor
from gact_graph.ops.reference.edges import owners_of
from gact_graph.ops.registration import operator


@operator(mutates=("out",))
def weighted_sum(
    out: Tensor,
    x: Tensor,
    places: Tensor | None,
    weight: Tensor,
    weight_places: Tensor | None,
    starts: Tensor,
) -> None:
    """Write the sums into ``out``.

    Args:
        out: The sums [R, W]; zeros for a row without edges.
        x: [N, W].
        places: The row p of x for each edge, int32 or int64 [E]; None if edge e has row e, and N is
            E.
        weight: [K, H], where H divides W.
        weight_places: The row q of each edge's weight, of the type of ``places`` [E]; None if edge
            e has row e, and K is E.
        starts: The first edge of each row, int64 [R + 1].

    Raises:
        TypeError: If a tensor has another dtype or layout.
        ValueError: If a tensor has another shape or device, or is not contiguous; if the heads do
            not share the columns evenly; or (on the CPU) if the starts decrease or do not span the
            edges.
        IndexError: If a place is out of range (on the CPU).
    """
    edges = check_sum(out, x, places, weight, weight_places, starts)
    rows = x if places is None else x.index_select(0, places)
    owners = owners_of(starts, edges)
    out.zero_().index_add_(0, owners, _times(rows, _weights(weight, weight_places)))


@operator()
def weighted_sum_weights(
    gradient: Tensor, x: Tensor, places: Tensor | None, starts: Tensor, heads: int
) -> Tensor:
    """Return the gradient of the weights [E, H], in the order of edges.

    Args:
        gradient: The gradient of the sums [R, W].
        x, places, starts: As for :func:`weighted_sum`.
        heads: H.

    Raises:
        TypeError, ValueError, IndexError: As :func:`weighted_sum`.
    """
    edges = check_weights(gradient, x, places, starts, heads)
    rows = x if places is None else x.index_select(0, places)
    product = gradient.index_select(0, owners_of(starts, edges)).mul_(rows)
    return product.view(edges, heads, x.size(1) // heads).sum(-1)


@operator(mutates=("of_x", "of_weight"))
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
    """Write the gradients of x and of the weights in one pass over edges sorted by source.

    Args:
        of_x: The gradient of x [R, W]; zeros for a source without edges.
        of_weight: The gradient of the weights [K, H]; rows that belong to no edge are left
            unchanged.
        gradient: The gradient of the sums [D, W].
        x: [R, W].
        places: The destination of each edge, int32 or int64 [E].
        weight: [K, H].
        weight_places: The row of each edge's weight, of the same type [E], without duplicates.
        starts: The first edge of each source, int64 [R + 1].

    Raises:
        TypeError, ValueError, IndexError: As :func:`weighted_sum`.
    """
    edges = check_backward(of_x, of_weight, gradient, x, places, weight, weight_places, starts)
    owners, rows = owners_of(starts, edges), gradient.index_select(0, places)
    of_x.zero_().index_add_(0, owners, _times(rows, _weights(weight, weight_places)))
    heads, width = weight.size(1), x.size(1)
    product = rows.mul_(x.index_select(0, owners)).view(edges, heads, width // heads)
    of_weight.index_copy_(0, weight_places.long(), product.sum(-1))


def check_sum(
    out: Tensor,
    x: Tensor,
    places: Tensor | None,
    weight: Tensor,
    weight_places: Tensor | None,
    starts: Tensor,
) -> int:
    """Check the arguments of :func:`weighted_sum`; return the number of edges."""
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
    """Check the arguments of :func:`weighted_sum_weights`; return the number of edges."""
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
    """Check the arguments of :func:`weighted_sum_backward`; return the number of edges."""
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
    product = rows.view(edges, heads, rows.size(1) // heads) * weight.unsqueeze(-1)
    return product.view(edges, rows.size(1))
