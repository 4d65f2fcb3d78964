"""Attention weights in plain torch: the oracle of the kernels, and what runs without them."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from gact_graph.ops.checks import check_edges, check_matrix, check_range, check_tensor
from gact_graph.ops.reference.edges import owners_of
from gact_graph.ops.reference.softmax import (
    check_attended,
    kept,
    places_of,
    softmax,
    softmax_backward,
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
    edges = places, weight_places, starts
    check_attention(out, source, destination, terms, *edges, dropout)
    out.index_copy_(0, *_weights(source, destination, terms, *edges, slope, dropout, seed))


def written_out(
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
    """The same weights for all edges, as a tensor that autograd differentiates as often as wished.

    Args: as of :func:`attention`.
    """
    edges = places, weight_places, starts
    at, weight = _weights(source, destination, terms, *edges, slope, dropout, seed)
    return torch.zeros_like(weight).index_copy(0, at, weight)


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
    """The places of the edges, and their weights there."""
    at = places_of(weight_places, places.numel(), source.device)
    score = _sums(source, destination, terms, places, at, starts)
    weight = softmax(F.leaky_relu(score, slope), starts)
    return at, weight * kept(at, weight, dropout, seed)


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
    inputs = gradient, source, destination, terms, places, weight_places, starts, dropout
    check_attention_backward(of_score, of_destination, *inputs)
    at = places_of(weight_places, places.numel(), source.device)
    score = _sums(source, destination, terms, places, at, starts)
    weight = softmax(F.leaky_relu(score, slope), starts)
    given = gradient[at] * kept(at, gradient, dropout, seed)
    found = softmax_backward(given, weight, starts)
    found = torch.where(score > 0, found, found * slope)
    of_score[at] = found
    of_destination.zero_().index_add_(0, owners_of(starts, len(found)), found)


def segment_sum(out: Tensor, x: Tensor, places: Tensor, starts: Tensor) -> None:
    check_segment_sum(out, x, places, starts)
    out.zero_().index_add_(0, owners_of(starts, places.numel()), x.index_select(0, places))


def check_segment_sum(out: Tensor, x: Tensor, places: Tensor, starts: Tensor) -> None:
    """Raises unless these are what :func:`segment_sum` takes."""
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
    """Raises unless these are what :func:`attention` takes."""
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
    """Raises unless these are what :func:`attention_backward` takes."""
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
    whole: Tensor,
    name: str,
) -> None:
    check_matrix("source", source, None, source.device)
    edges, heads = (places, weight_places, starts), source.size(1)
    check_attended(source, destination, heads, *edges, dropout, whole, name)
    if terms is not None:
        check_tensor("terms", terms, source.dtype, [*whole.shape], source.device)


def _sums(
    source: Tensor,
    destination: Tensor,
    terms: Tensor | None,
    places: Tensor,
    weight_places: Tensor,
    starts: Tensor,
) -> Tensor:
    found = source.index_select(0, places) + destination[owners_of(starts, places.numel())]
    return found if terms is None else found + terms.index_select(0, weight_places)
