"""Attention weights from rows in plain torch: the oracle of the kernels, and what runs without
them."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from gact_graph.ops.checks import check_edges, check_matrix, check_places, check_range, check_tensor
from gact_graph.ops.reference.edges import owners_of
from gact_graph.ops.reference.softmax import (
    check_attended,
    kept,
    places_of,
    softmax,
    softmax_backward,
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
    edges = places, weight_places, starts
    check_leaky_attention(out, source, destination, att, *edges, dropout)
    out.index_copy_(0, *_weights(source, destination, att, *edges, slope, dropout, seed))


def written_out(
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
    """The same weights for all edges, as a tensor that autograd differentiates as often as wished.

    Args: as of :func:`leaky_attention`.
    """
    edges = places, weight_places, starts
    at, weight = _weights(source, destination, att, *edges, slope, dropout, seed)
    return torch.zeros_like(weight).index_copy(0, at, weight)


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
    """The places of the edges, and their weights there."""
    _, score = _scores(source, destination, att, places, starts, slope)
    weight = softmax(score, starts)
    at = places_of(weight_places, len(weight), weight.device)
    return at, weight * kept(at, weight, dropout, seed)


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
    inputs = gradient, source, destination, att, places, weight_places, starts, dropout
    check_leaky_attention_backward(of_score, of_destination, of_att, *inputs)
    sums, score = _scores(source, destination, att, places, starts, slope)
    weight = softmax(score, starts)
    at = places_of(weight_places, len(weight), weight.device)
    given = gradient[at] * kept(at, gradient, dropout, seed)
    found = softmax_backward(given, weight, starts)
    of_score[at] = found
    of_att.copy_((found.unsqueeze(-1) * F.leaky_relu(sums, slope)).sum(0))
    of_sums = _of_sums(found, sums, att, slope)
    of_destination.zero_().index_add_(0, owners_of(starts, len(found)), of_sums)


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
    given = of_score, source, destination, att, places, weight_places, starts
    check_leaky_attention_source(of_source, *given)
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
    """Raises unless these are what :func:`leaky_attention` takes."""
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
    """Raises unless these are what :func:`leaky_attention_backward` takes."""
    edges = places, weight_places, starts
    _check(source, destination, att, *edges, dropout, gradient, "gradient")
    for name, one, like in (
        ("of_score", of_score, gradient),
        ("of_destination", of_destination, destination),
        ("of_att", of_att, att),
    ):
        check_tensor(name, one, source.dtype, [*like.shape], source.device)


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
    """Raises unless these are what :func:`leaky_attention_source` takes."""
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
    whole: Tensor,
    name: str,
) -> None:
    _check_att(att, source)
    edges = places, weight_places, starts
    check_attended(source, destination, att.size(0), *edges, dropout, whole, name)


def _check_att(att: Tensor, source: Tensor) -> None:
    check_matrix("source", source, None, source.device)
    check_matrix("att", att, None, source.device)
    check_tensor("att", att, source.dtype, [*att.shape], source.device)
    if att.numel() != source.size(1):
        raise ValueError(f"Expected att of {source.size(1)} elements (got {att.numel()})")


def _scores(
    source: Tensor, destination: Tensor, att: Tensor, places: Tensor, starts: Tensor, slope: float
) -> tuple[Tensor, Tensor]:
    """What the rows of edges add up to [E, H, C], and the scores [E, H]."""
    sums = _sums(source, destination, att, places, starts)
    return sums, (F.leaky_relu(sums, slope) * att).sum(-1)


def _sums(
    source: Tensor, destination: Tensor, att: Tensor, places: Tensor, starts: Tensor
) -> Tensor:
    found = source.index_select(0, places) + destination[owners_of(starts, places.numel())]
    return found.view(-1, *att.shape)


def _of_sums(of_score: Tensor, sums: Tensor, att: Tensor, slope: float) -> Tensor:
    """The gradient of what the rows of edges add up to, as a matrix."""
    found = of_score.unsqueeze(-1) * att
    return torch.where(sums > 0, found, found * slope).flatten(1)
