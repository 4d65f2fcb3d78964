"""Attention weights from node rows, in pure torch: see :mod:`gact_graph.ops.leaky_attention`."""

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
    shapes="source: N W, att: H C, places: E < N, starts: R + 1, destination: R W, "
    "weight_places: E < K, out: K H",
)
def leaky_attention(
    out: Tensor,
    source: Tensor,
    destination: Tensor,
    att: Tensor,
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
        source: The rows a of the sources [N, H * C].
        destination: The rows b of the destinations [R, H * C].
        att: The vectors v [H, C].
        places: The source p of each edge, int32 or int64 [E].
        weight_places: The row q of each edge's weight, of the same type [E]; None if edge e has
            row e, and K is E.
        starts: The first edge of each destination, int64 [R + 1].
        slope: The slope of LeakyReLU for negative sums.
        dropout: The probability that a weight becomes 0, from 0 to less than 1.
        seed: The seed of dropout, 64 bits.
    """
    _, score = _scores(source, destination, att, places, starts, slope)
    out.index_copy_(0, *attention_weights(score, weight_places, starts, dropout, seed))


def differentiable_leaky_attention(
    source: Tensor,
    destination: Tensor,
    att: Tensor,
    places: Tensor,
    weight_places: Tensor | None,
    starts: Tensor,
    slope: float,
    dropout: float,
    seed: int,
) -> Tensor:
    """Return the weights of all edges as a tensor that autograd differentiates, to any order.

    The arguments are those of :func:`leaky_attention`.
    """
    _, score = _scores(source, destination, att, places, starts, slope)
    rows, weight = attention_weights(score, weight_places, starts, dropout, seed)
    return torch.zeros_like(weight).index_copy(0, rows, weight)


@operator(
    mutates=("of_score", "of_destination", "of_att"),
    shapes="source: N W, att: H C, places: E < N, starts: R + 1, destination: R W, "
    "weight_places: E < K, gradient: K H, of_score: K H, of_destination: R W, of_att: H C",
)
def leaky_attention_backward(
    of_score: Tensor,
    of_destination: Tensor,
    of_att: Tensor,
    gradient: Tensor,
    source: Tensor,
    destination: Tensor,
    att: Tensor,
    places: Tensor,
    weight_places: Tensor | None,
    starts: Tensor,
    slope: float,
    dropout: float,
    seed: int,
) -> None:
    """Write the gradients of the scores, of ``destination`` and of ``att``.

    Args:
        of_score: The gradient of s for each edge [K, H], indexed as the weights.
            :func:`leaky_attention_source` computes the gradient of ``source`` from it.
        of_destination: The gradient of ``destination`` [R, H * C].
        of_att: The gradient of ``att`` [H, C].
        gradient: The gradient of the weights [K, H].
        source, destination, att, places, weight_places, starts, slope, dropout, seed: As for
            :func:`leaky_attention`.
    """
    sums, score = _scores(source, destination, att, places, starts, slope)
    weighting = weight_places, starts, dropout, seed
    rows, of_edge = attention_weights_backward(gradient, score, *weighting)
    of_score[rows] = of_edge
    of_att.copy_((of_edge.unsqueeze(-1) * F.leaky_relu(sums, slope)).sum(0))
    of_sums = _of_sums(of_edge, sums, att, slope)
    of_destination.zero_().index_add_(0, owners_of(starts, len(of_edge)), of_sums)


@operator(
    mutates=("of_source",),
    shapes="starts: R + 1, source: R W, att: H C, destination: D W, places: E < D, "
    "weight_places: E < K, of_score: K H, of_source: R W",
)
def leaky_attention_source(
    of_source: Tensor,
    of_score: Tensor,
    source: Tensor,
    destination: Tensor,
    att: Tensor,
    places: Tensor,
    weight_places: Tensor,
    starts: Tensor,
    slope: float,
) -> None:
    """Write the gradient of ``source`` in one pass over edges that are sorted by source.

    Args:
        of_source: The gradient of ``source`` [R, H * C]; zeros for a source without edges.
        of_score: The gradient of s [K, H].
        source: The rows a of the sources [R, H * C].
        destination: The rows b of the destinations [D, H * C].
        att: The vectors v [H, C].
        places: The destination of each edge, int32 or int64 [E].
        weight_places: The row of each edge's score, of the same type [E].
        starts: The first edge of each source, int64 [R + 1].
        slope: The slope of LeakyReLU for negative sums.
    """
    sums = _sums(destination, source, att, places, starts)
    of_sums = _of_sums(of_score.index_select(0, weight_places), sums, att, slope)
    of_source.zero_().index_add_(0, owners_of(starts, places.numel()), of_sums)


def _scores(
    source: Tensor, destination: Tensor, att: Tensor, places: Tensor, starts: Tensor, slope: float
) -> tuple[Tensor, Tensor]:
    """Return the sums a + b of the edges [E, H, C], and their scores [E, H]."""
    sums = _sums(source, destination, att, places, starts)
    return sums, (F.leaky_relu(sums, slope) * att).sum(-1)


def _sums(
    source: Tensor, destination: Tensor, att: Tensor, places: Tensor, starts: Tensor
) -> Tensor:
    sums = source.index_select(0, places) + destination[owners_of(starts, places.numel())]
    return sums.view(-1, *att.shape)


def _of_sums(of_score: Tensor, sums: Tensor, att: Tensor, slope: float) -> Tensor:
    """Return the gradient of the sums a + b [E, H * C]."""
    of_leaky = of_score.unsqueeze(-1) * att
    return torch.where(sums > 0, of_leaky, of_leaky * slope).flatten(1)
