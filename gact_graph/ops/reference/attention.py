"""Attention weights in plain torch: the oracle of ``csrc/cpu``, and what other devices run."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from gact_graph.ops.checks import check_edges, check_matrix, check_places, check_range, check_tensor
from gact_graph.ops.reference.edges import owners_of
from gact_graph.ops.reference.quantize import noise16

_GRAINS = 1 << 16


def attention(
    out: Tensor,
    source: Tensor,
    destination: Tensor,
    places: Tensor,
    weight_places: Tensor | None,
    starts: Tensor,
    slope: float,
    dropout: float,
    seed: int,
) -> None:
    _check(source, destination, places, weight_places, starts, dropout, out, "out")
    edges = places, weight_places, starts
    out.index_copy_(0, *_weights(source, destination, *edges, slope, dropout, seed))


def written_out(
    source: Tensor,
    destination: Tensor,
    places: Tensor,
    weight_places: Tensor,
    starts: Tensor,
    slope: float,
    dropout: float,
    seed: int,
) -> Tensor:
    """The same weights for all edges, as a tensor that autograd differentiates as often as wished.

    Args: as of :func:`attention`.
    """
    edges = places, weight_places, starts
    at, weight = _weights(source, destination, *edges, slope, dropout, seed)
    return torch.zeros_like(weight).index_copy(0, at, weight)


def _weights(
    source: Tensor,
    destination: Tensor,
    places: Tensor,
    weight_places: Tensor | None,
    starts: Tensor,
    slope: float,
    dropout: float,
    seed: int,
) -> tuple[Tensor, Tensor]:
    """The places of the edges, and their weights there."""
    owners = owners_of(starts, places.numel())
    _, weight = _softmax(source, destination, places, owners, slope)
    at = _places_of(weight_places, owners)
    return at, weight * _kept(at, weight, dropout, seed)


def attention_backward(
    of_score: Tensor,
    of_destination: Tensor,
    gradient: Tensor,
    source: Tensor,
    destination: Tensor,
    places: Tensor,
    weight_places: Tensor | None,
    starts: Tensor,
    slope: float,
    dropout: float,
    seed: int,
) -> None:
    _check(source, destination, places, weight_places, starts, dropout, gradient, "gradient")
    check_tensor("of_score", of_score, source.dtype, [*gradient.shape], source.device)
    shape = [*destination.shape]
    check_tensor("of_destination", of_destination, source.dtype, shape, source.device)
    owners = owners_of(starts, places.numel())
    score, weight = _softmax(source, destination, places, owners, slope)
    at = _places_of(weight_places, owners)
    given = gradient[at] * _kept(at, gradient, dropout, seed)
    mean = torch.zeros_like(destination).index_add_(0, owners, weight * given)
    found = weight * (given - mean[owners])
    found = torch.where(score > 0, found, found * slope)
    of_score[at] = found
    of_destination.zero_().index_add_(0, owners, found)


def segment_sum(out: Tensor, x: Tensor, places: Tensor, starts: Tensor) -> None:
    check_matrix("x", x, None, x.device)
    rows = check_edges(places, starts, places.numel(), x.device)
    check_range("places", places, x.size(0) - 1)
    check_tensor("out", out, x.dtype, [rows, x.size(1)], x.device)
    out.zero_().index_add_(0, owners_of(starts, places.numel()), x.index_select(0, places))


def _check(
    source: Tensor,
    destination: Tensor,
    places: Tensor,
    weight_places: Tensor | None,
    starts: Tensor,
    dropout: float,
    whole: Tensor,
    name: str,
) -> None:
    check_matrix("source", source, None, source.device)
    edges, heads = places.numel(), source.size(1)
    rows = check_edges(places, starts, edges, source.device)
    check_tensor("destination", destination, source.dtype, [rows, heads], source.device)
    if not 0 <= dropout < 1:
        raise ValueError(f"Expected dropout from 0 to less than 1 (got {dropout})")
    check_range("places", places, source.size(0) - 1)
    check_matrix(name, whole, None, source.device)
    length = edges if weight_places is None else whole.size(0)
    check_tensor(name, whole, source.dtype, [length, heads], source.device)
    if weight_places is not None:
        check_places("weight_places", weight_places, edges, source.device)
        check_range("weight_places", weight_places, length - 1)


def _softmax(
    source: Tensor, destination: Tensor, places: Tensor, owners: Tensor, slope: float
) -> tuple[Tensor, Tensor]:
    """What the edges add up, and their weights before dropout."""
    score = source.index_select(0, places) + destination[owners]
    found = F.leaky_relu(score, slope)
    most = torch.full_like(destination, -torch.inf, requires_grad=False)
    # The largest cancels: no gradient goes through it.
    most.scatter_reduce_(0, owners.unsqueeze(1).expand_as(found), found.detach(), "amax")
    found = (found - most[owners]).exp()
    total = torch.zeros_like(destination).index_add_(0, owners, found) + 1e-16
    return score, found / total[owners]


def _kept(at: Tensor, whole: Tensor, dropout: float, seed: int) -> Tensor:
    """What dropout multiplies the weights at these places by."""
    heads = whole.size(1)
    dropped = min(round(dropout * _GRAINS), _GRAINS - 1)
    index = at.unsqueeze(1) * heads + torch.arange(heads, device=at.device)
    kept = noise16(index, seed) >= dropped
    return kept.to(whole.dtype) * (_GRAINS / (_GRAINS - dropped))


def _places_of(weight_places: Tensor | None, owners: Tensor) -> Tensor:
    if weight_places is None:
        return torch.arange(len(owners), device=owners.device)
    return weight_places.long()
