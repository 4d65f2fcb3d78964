"""Attention weights from the rows of nodes, in pure torch: see
:mod:`gact_graph.ops.leaky_attention`."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from gact_graph.ops.checks import check_edges, check_matrix, check_places, check_range, check_tensor
from gact_graph.ops.reference.edges import owners_of
from gact_graph.ops.reference.softmax import (
    check_attention_inputs,
    dropout_factor,
    places_of,
    softmax,
    softmax_backward,
)
from gact_graph.ops.registration import operator


@operator(mutates=("out",))
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

    Raises:
        TypeError: If a tensor has another dtype or layout.
        ValueError: If a tensor has another shape or device, or is not contiguous; if dropout is out
            of range; or (on the CPU) if the starts decrease or do not span the edges.
        IndexError: If a place is out of range (on the CPU).
    """
    edges = places, weight_places, starts
    check_leaky_attention(out, source, destination, att, *edges, dropout)
    out.index_copy_(0, *_weights(source, destination, att, *edges, slope, dropout, seed))


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
    edges = places, weight_places, starts
    rows, weight = _weights(source, destination, att, *edges, slope, dropout, seed)
    return torch.zeros_like(weight).index_copy(0, rows, weight)


written_out = differentiable_leaky_attention  # the name that layers/blocks imports


def _weights(
    source: Tensor,
    destination: Tensor,
    att: Tensor,
    places: Tensor,
    weight_places: Tensor | None,
    starts: Tensor,
    slope: float,
    dropout: float,
    seed: int,
) -> tuple[Tensor, Tensor]:
    """Return the row of each edge's weight [E], and the weights in the order of edges [E, H]."""
    _, score = _scores(source, destination, att, places, starts, slope)
    weight = softmax(score, starts)
    rows = places_of(weight_places, len(weight), weight.device)
    return rows, weight * dropout_factor(rows, weight, dropout, seed)


@operator(mutates=("of_score", "of_destination", "of_att"))
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

    Raises:
        TypeError, ValueError, IndexError: As :func:`leaky_attention`.
    """
    inputs = gradient, source, destination, att, places, weight_places, starts, dropout
    check_leaky_attention_backward(of_score, of_destination, of_att, *inputs)
    sums, score = _scores(source, destination, att, places, starts, slope)
    weight = softmax(score, starts)
    rows = places_of(weight_places, len(weight), weight.device)
    of_weight = gradient[rows] * dropout_factor(rows, gradient, dropout, seed)
    of_edge = softmax_backward(of_weight, weight, starts)
    of_score[rows] = of_edge
    of_att.copy_((of_edge.unsqueeze(-1) * F.leaky_relu(sums, slope)).sum(0))
    of_sums = _of_sums(of_edge, sums, att, slope)
    of_destination.zero_().index_add_(0, owners_of(starts, len(of_edge)), of_sums)


@operator(mutates=("of_source",))
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

    Raises:
        TypeError, ValueError, IndexError: As :func:`leaky_attention`.
    """
    inputs = of_score, source, destination, att, places, weight_places, starts
    check_leaky_attention_source(of_source, *inputs)
    sums = _sums(destination, source, att, places, starts)
    of_sums = _of_sums(of_score.index_select(0, weight_places), sums, att, slope)
    of_source.zero_().index_add_(0, owners_of(starts, places.numel()), of_sums)


def check_leaky_attention(
    out: Tensor,
    source: Tensor,
    destination: Tensor,
    att: Tensor,
    places: Tensor,
    weight_places: Tensor | None,
    starts: Tensor,
    dropout: float,
) -> None:
    """Raise an error for invalid arguments of :func:`leaky_attention`."""
    _check(source, destination, att, places, weight_places, starts, dropout, out, "out")


def check_leaky_attention_backward(
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
    dropout: float,
) -> None:
    """Raise an error for invalid arguments of :func:`leaky_attention_backward`."""
    edges = places, weight_places, starts
    _check(source, destination, att, *edges, dropout, gradient, "gradient")
    for name, output, like in (
        ("of_score", of_score, gradient),
        ("of_destination", of_destination, destination),
        ("of_att", of_att, att),
    ):
        check_tensor(name, output, source.dtype, [*like.shape], source.device)


def check_leaky_attention_source(
    of_source: Tensor,
    of_score: Tensor,
    source: Tensor,
    destination: Tensor,
    att: Tensor,
    places: Tensor,
    weight_places: Tensor,
    starts: Tensor,
) -> None:
    """Raise an error for invalid arguments of :func:`leaky_attention_source`."""
    edges = places.numel()
    _check_att(att, source)
    rows = check_edges(places, starts, edges, source.device)
    kind, width = source.dtype, source.size(1)
    check_matrix("of_score", of_score, None, source.device)
    check_tensor("of_score", of_score, kind, [of_score.size(0), att.size(0)], source.device)
    check_matrix("destination", destination, None, source.device)
    check_tensor("destination", destination, kind, [destination.size(0), width], source.device)
    check_tensor("source", source, kind, [rows, width], source.device)
    check_tensor("of_source", of_source, kind, [rows, width], source.device)
    check_range("places", places, destination.size(0) - 1)
    check_places("weight_places", weight_places, edges, source.device)
    check_range("weight_places", weight_places, of_score.size(0) - 1)


def _check(
    source: Tensor,
    destination: Tensor,
    att: Tensor,
    places: Tensor,
    weight_places: Tensor | None,
    starts: Tensor,
    dropout: float,
    weights: Tensor,
    name: str,
) -> None:
    _check_att(att, source)
    edges = places, weight_places, starts
    check_attention_inputs(source, destination, att.size(0), *edges, dropout, weights, name)


def _check_att(att: Tensor, source: Tensor) -> None:
    check_matrix("source", source, None, source.device)
    check_matrix("att", att, None, source.device)
    check_tensor("att", att, source.dtype, [*att.shape], source.device)
    if att.numel() != source.size(1):
        raise ValueError(f"Expected att of {source.size(1)} elements (got {att.numel()})")


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
