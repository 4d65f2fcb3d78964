"""Attention weights from scores of nodes, in pure torch: see :mod:`gact_graph.ops.attention`."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from gact_graph.ops.checks import check_edges, check_matrix, check_range, check_tensor
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

    Raises:
        TypeError: If a tensor has another dtype or layout.
        ValueError: If a tensor has another shape or device, or is not contiguous; if dropout is out
            of range; or (on the CPU) if the starts decrease or do not span the edges.
        IndexError: If a place is out of range (on the CPU).
    """
    edges = places, weight_places, starts
    check_attention(out, source, destination, terms, *edges, dropout)
    out.index_copy_(0, *_weights(source, destination, terms, *edges, slope, dropout, seed))


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
    edges = places, weight_places, starts
    rows, weight = _weights(source, destination, terms, *edges, slope, dropout, seed)
    return torch.zeros_like(weight).index_copy(0, rows, weight)


written_out = differentiable_attention  # the name that layers/blocks imports


def _weights(
    source: Tensor,
    destination: Tensor,
    terms: Tensor | None,
    places: Tensor,
    weight_places: Tensor | None,
    starts: Tensor,
    slope: float,
    dropout: float,
    seed: int,
) -> tuple[Tensor, Tensor]:
    """Return the row of each edge's weight [E], and the weights in the order of edges [E, H]."""
    rows = places_of(weight_places, places.numel(), source.device)
    score = _sums(source, destination, terms, places, rows, starts)
    weight = softmax(F.leaky_relu(score, slope), starts)
    return rows, weight * dropout_factor(rows, weight, dropout, seed)


@operator(mutates=("of_score", "of_destination"))
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

    Raises:
        TypeError, ValueError, IndexError: As :func:`attention`.
    """
    inputs = gradient, source, destination, terms, places, weight_places, starts, dropout
    check_attention_backward(of_score, of_destination, *inputs)
    rows = places_of(weight_places, places.numel(), source.device)
    score = _sums(source, destination, terms, places, rows, starts)
    weight = softmax(F.leaky_relu(score, slope), starts)
    of_weight = gradient[rows] * dropout_factor(rows, gradient, dropout, seed)
    of_leaky = softmax_backward(of_weight, weight, starts)
    of_sum = torch.where(score > 0, of_leaky, of_leaky * slope)
    of_score[rows] = of_sum
    of_destination.zero_().index_add_(0, owners_of(starts, len(of_sum)), of_sum)


@operator(mutates=("out",))
def segment_sum(out: Tensor, x: Tensor, places: Tensor, starts: Tensor) -> None:
    """Write the sum of each row's edges into ``out``, where edge e has row ``places[e]`` of x.

    Args:
        out: The sums [R, W]; zeros for a row without edges.
        x: [N, W].
        places: int32 or int64 [E].
        starts: The first edge of each row, int64 [R + 1].

    Raises:
        TypeError, ValueError, IndexError: As :func:`attention`.
    """
    check_segment_sum(out, x, places, starts)
    out.zero_().index_add_(0, owners_of(starts, places.numel()), x.index_select(0, places))


def check_segment_sum(out: Tensor, x: Tensor, places: Tensor, starts: Tensor) -> None:
    """Raise an error for invalid arguments of :func:`segment_sum`."""
    check_matrix("x", x, None, x.device)
    rows = check_edges(places, starts, places.numel(), x.device)
    check_range("places", places, x.size(0) - 1)
    check_tensor("out", out, x.dtype, [rows, x.size(1)], x.device)


def check_attention(
    out: Tensor,
    source: Tensor,
    destination: Tensor,
    terms: Tensor | None,
    places: Tensor,
    weight_places: Tensor | None,
    starts: Tensor,
    dropout: float,
) -> None:
    """Raise an error for invalid arguments of :func:`attention`."""
    _check(source, destination, terms, places, weight_places, starts, dropout, out, "out")


def check_attention_backward(
    of_score: Tensor,
    of_destination: Tensor,
    gradient: Tensor,
    source: Tensor,
    destination: Tensor,
    terms: Tensor | None,
    places: Tensor,
    weight_places: Tensor | None,
    starts: Tensor,
    dropout: float,
) -> None:
    """Raise an error for invalid arguments of :func:`attention_backward`."""
    _check(source, destination, terms, places, weight_places, starts, dropout, gradient, "gradient")
    check_tensor("of_score", of_score, source.dtype, [*gradient.shape], source.device)
    shape = [*destination.shape]
    check_tensor("of_destination", of_destination, source.dtype, shape, source.device)


def _check(
    source: Tensor,
    destination: Tensor,
    terms: Tensor | None,
    places: Tensor,
    weight_places: Tensor | None,
    starts: Tensor,
    dropout: float,
    weights: Tensor,
    name: str,
) -> None:
    check_matrix("source", source, None, source.device)
    edges, heads = (places, weight_places, starts), source.size(1)
    check_attention_inputs(source, destination, heads, *edges, dropout, weights, name)
    if terms is not None:
        check_tensor("terms", terms, source.dtype, [*weights.shape], source.device)


def _sums(
    source: Tensor,
    destination: Tensor,
    terms: Tensor | None,
    places: Tensor,
    rows: Tensor,
    starts: Tensor,
) -> Tensor:
    ends = source.index_select(0, places) + destination[owners_of(starts, places.numel())]
    return ends if terms is None else ends + terms.index_select(0, rows)
