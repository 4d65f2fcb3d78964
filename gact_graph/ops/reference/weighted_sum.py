"""Sums of weighted rows, in pure torch: see :mod:`gact_graph.ops.weighted_sum`."""

from __future__ import annotations

from torch import Tensor

from gact_graph.ops.reference.edges import owners_of
from gact_graph.ops.registration import operator


@operator(
    mutates=("out",),
    shapes="x: N W, places: E < N, starts: R + 1, weight_places: E < K, weight: K H, out: R W",
)
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
    """
    rows, weights = _at(x, places), _at(weight, weight_places)
    out.zero_().index_add_(0, owners_of(starts, len(rows)), _times(rows, weights))


@operator(shapes="x: N W, places: E < N, starts: R + 1, gradient: R W, heads: H")
def weighted_sum_weights(
    gradient: Tensor, x: Tensor, places: Tensor | None, starts: Tensor, heads: int
) -> Tensor:
    """Return the gradient of the weights [E, H], in the order of edges.

    Args:
        gradient: The gradient of the sums [R, W].
        x, places, starts: As for :func:`weighted_sum`.
        heads: H.
    """
    rows = _at(x, places)
    product = gradient.index_select(0, owners_of(starts, len(rows))).mul_(rows)
    return product.view(len(rows), heads, x.size(1) // heads).sum(-1)


@operator(
    mutates=("of_x", "of_weight"),
    shapes="starts: R + 1, x: R W, gradient: D W, places: E < D, weight_places: E < K, "
    "weight: K H, of_x: R W, of_weight: K H",
)
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
    """
    owners, rows = owners_of(starts, places.numel()), _at(gradient, places)
    of_x.zero_().index_add_(0, owners, _times(rows, _at(weight, weight_places)))
    heads, width = weight.size(1), x.size(1)
    product = rows.mul_(_at(x, owners)).view(len(rows), heads, width // heads)
    of_weight.index_copy_(0, weight_places.long(), product.sum(-1))


def _at(x: Tensor, places: Tensor | None) -> Tensor:
    return x if places is None else x.index_select(0, places)


def _times(rows: Tensor, weight: Tensor) -> Tensor:
    edges, heads = weight.shape
    product = rows.view(edges, heads, rows.size(1) // heads) * weight.unsqueeze(-1)
    return product.view(edges, rows.size(1))
