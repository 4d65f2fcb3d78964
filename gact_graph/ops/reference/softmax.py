"""From the scores of edges to their weights and back, in plain torch: for attention of any kind."""

from __future__ import annotations

import torch
from torch import Tensor

from gact_graph.ops.checks import check_edges, check_matrix, check_places, check_range, check_tensor
from gact_graph.ops.reference.edges import owners_of
from gact_graph.ops.reference.quantize import noise16

GRAINS = 1 << 16
"""Steps of dropout."""


def check_attended(
    source: Tensor,
    destination: Tensor,
    heads: int,
    places: Tensor,
    weight_places: Tensor | None,
    starts: Tensor,
    dropout: float,
    whole: Tensor,
    name: str,
) -> None:
    """Raises unless these are what an operator of attention takes; ``whole`` has the weights."""
    check_matrix("source", source, None, source.device)
    edges, width = places.numel(), source.size(1)
    rows = check_edges(places, starts, edges, source.device)
    check_tensor("destination", destination, source.dtype, [rows, width], source.device)
    check_dropout(dropout)
    check_range("places", places, source.size(0) - 1)
    check_matrix(name, whole, None, source.device)
    length = edges if weight_places is None else whole.size(0)
    check_tensor(name, whole, source.dtype, [length, heads], source.device)
    if weight_places is not None:
        check_places("weight_places", weight_places, edges, source.device)
        check_range("weight_places", weight_places, length - 1)


def check_dropout(dropout: float) -> None:
    if not 0 <= dropout < 1:
        raise ValueError(f"Expected dropout from 0 to less than 1 (got {dropout})")


def softmax(score: Tensor, starts: Tensor) -> Tensor:
    """The weights [E, H] of the edges of each row, before dropout.

    Args:
        score: [E, H], sorted by row.
        starts: int64 [R + 1].
    """
    owners, rows = owners_of(starts, len(score)), len(starts) - 1
    most = score.new_full((rows, score.size(1)), -torch.inf)
    # The largest cancels: no gradient goes through it.
    most.scatter_reduce_(0, owners.unsqueeze(1).expand_as(score), score.detach(), "amax")
    found = (score - most[owners]).exp()
    total = torch.zeros_like(most).index_add(0, owners, found) + 1e-16
    return found / total[owners]


def softmax_backward(gradient: Tensor, weight: Tensor, starts: Tensor) -> Tensor:
    """The gradient of the scores [E, H], from that of the weights and the weights themselves."""
    owners, rows = owners_of(starts, len(weight)), len(starts) - 1
    mean = weight.new_zeros(rows, weight.size(1)).index_add_(0, owners, weight * gradient)
    return weight * (gradient - mean[owners])


def dropped_of(dropout: float) -> int:
    """How many of :data:`GRAINS` become 0."""
    return min(round(dropout * GRAINS), GRAINS - 1)


def kept(at: Tensor, whole: Tensor, dropout: float, seed: int) -> Tensor:
    """What dropout multiplies the weights at these places by."""
    heads = whole.size(1)
    dropped = dropped_of(dropout)
    index = at.unsqueeze(1) * heads + torch.arange(heads, device=at.device)
    found = noise16(index, seed) >= dropped
    return found.to(whole.dtype) * (GRAINS / (GRAINS - dropped))


def places_of(weight_places: Tensor | None, edges: int, device: torch.device) -> Tensor:
    """The place of the weight of each of E edges."""
    if weight_places is None:
        return torch.arange(edges, device=device)
    return weight_places.long()
