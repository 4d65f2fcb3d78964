"""Attention weights from scores of nodes, in pure torch: see :mod:`gact_graph.ops.attention`."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from gact_graph.ops.reference.edges import (
    attention_weights,
    attention_weights_backward,
    owners_of,
)
from gact_graph.ops.registration import operator


@operator(
    mutates=("out",),
    shapes="source: N H, places: E < N, starts: R + 1, destination: R H, weight_places: E < K, "
    "out: K H, terms: K H",
)
def attention(
    out: Tensor,
    source: Tensor,
    destination: Tensor,
    terms: Tensor | None,
    places: Tensor,
    weight_places: Tensor | None,
    starts: Tensor,
    slope: float,
    dropout: float,
    seed: int,
) -> None:
    """Write the attention weights w into ``out``, and leave rows that belong to no edge unchanged.

    Args:
        out: The weights [K, H].
        source: The scores a of the sources [N, H].
        destination: The scores b of the destinations [R, H].
        terms: The scores c of the edges [K, H], indexed as the weights; None for none.
        places: The source p of each edge, int32 or int64 [E].
        weight_places: The row q of each edge's weight, of the same type [E]; None if edge e has
            row e, and K is E.
        starts: The first edge of each destination, int64 [R + 1].
        slope: The slope of LeakyReLU for negative scores.
        dropout: The probability that a weight becomes 0, from 0 to less than 1.
        seed: The seed of dropout, 64 bits.
    """
    score = F.leaky_relu(_sums(source, destination, terms, places, weight_places, starts), slope)
    out.index_copy_(0, *attention_weights(score, weight_places, starts, dropout, seed))


def differentiable_attention(
    source: Tensor,
    destination: Tensor,
    terms: Tensor | None,
    places: Tensor,
    weight_places: Tensor | None,
    starts: Tensor,
    slope: float,
    dropout: float,
    seed: int,
) -> Tensor:
    """Return the weights of all edges as a tensor that autograd differentiates, to any order.

    The arguments are those of :func:`attention`.
    """
    score = F.leaky_relu(_sums(source, destination, terms, places, weight_places, starts), slope)
    rows, weight = attention_weights(score, weight_places, starts, dropout, seed)
    return torch.zeros_like(weight).index_copy(0, rows, weight)


@operator(
    mutates=("of_score", "of_destination"),
    shapes="source: N H, places: E < N, starts: R + 1, destination: R H, weight_places: E < K, "
    "gradient: K H, terms: K H, of_score: K H, of_destination: R H",
)
def attention_backward(
    of_score: Tensor,
    of_destination: Tensor,
    gradient: Tensor,
    source: Tensor,
    destination: Tensor,
    terms: Tensor | None,
    places: Tensor,
    weight_places: Tensor | None,
    starts: Tensor,
    slope: float,
    dropout: float,
    seed: int,
) -> None:
    """Write the gradients of the sums a + b + c and of ``destination``.

    Args:
        of_score: The gradient of a + b + c for each edge [K, H], indexed as the weights. It is the
            gradient of ``terms``, and its :func:`segment_sum` by source that of ``source``.
        of_destination: The gradient of ``destination`` [R, H].
        gradient: The gradient of the weights [K, H].
        source, destination, terms, places, weight_places, starts, slope, dropout, seed: As for
            :func:`attention`.
    """
    score = _sums(source, destination, terms, places, weight_places, starts)
    weighting = weight_places, starts, dropout, seed
    rows, of_leaky = attention_weights_backward(gradient, F.leaky_relu(score, slope), *weighting)
    of_sum = torch.where(score > 0, of_leaky, of_leaky * slope)
    of_score[rows] = of_sum
    of_destination.zero_().index_add_(0, owners_of(starts, len(of_sum)), of_sum)


@operator(mutates=("out",), shapes="x: N W, places: E < N, starts: R + 1, out: R W")
def segment_sum(out: Tensor, x: Tensor, places: Tensor, starts: Tensor) -> None:
    """Write the sum of each row's edges into ``out``, where edge e has row ``places[e]`` of x.

    Args:
        out: The sums [R, W]; zeros for a row without edges.
        x: [N, W].
        places: int32 or int64 [E].
        starts: The first edge of each row, int64 [R + 1].
    """
    out.zero_().index_add_(0, owners_of(starts, places.numel()), x.index_select(0, places))


def _sums(
    source: Tensor,
    destination: Tensor,
    terms: Tensor | None,
    places: Tensor,
    weight_places: Tensor | None,
    starts: Tensor,
) -> Tensor:
    """Return a + b + c for each edge [E, H]."""
    sums = source.index_select(0, places) + destination[owners_of(starts, places.numel())]
    if terms is None:
        return sums
    return sums + (terms if weight_places is None else terms.index_select(0, weight_places))
