"""The softmax over the edges of a row, dropout, and their gradients, in pure torch."""

from __future__ import annotations

import torch
from torch import Tensor

from gact_graph.ops.checks import check_edges, check_matrix, check_places, check_range, check_tensor
from gact_graph.ops.reference.edges import owners_of
from gact_graph.ops.reference.quantize import noise16

GRAINS = 1 << 16
"""Dropout compares 16 random bits with a threshold: its probability is a multiple of 1 / GRAINS."""


def check_attention_inputs(
    source: Tensor,
    destination: Tensor,
    heads: int,
    places: Tensor,
    weight_places: Tensor | None,
    starts: Tensor,
    dropout: float,
    weights: Tensor,
    name: str,
) -> None:
    """Raise an error for arguments that no attention operator takes.

    Args:
        weights: The tensor of the weights, or of their gradient.
        name: The name of ``weights`` in messages.
    """
    check_matrix("source", source, None, source.device)
    edges, width = places.numel(), source.size(1)
    rows = check_edges(places, starts, edges, source.device)
    check_tensor("destination", destination, source.dtype, [rows, width], source.device)
    check_dropout(dropout)
    check_range("places", places, source.size(0) - 1)
    check_matrix(name, weights, None, source.device)
    length = edges if weight_places is None else weights.size(0)
    check_tensor(name, weights, source.dtype, [length, heads], source.device)
    if weight_places is not None:
        check_places("weight_places", weight_places, edges, source.device)
        check_range("weight_places", weight_places, length - 1)


def check_dropout(dropout: float) -> None:
    if not 0 <= dropout < 1:
        raise ValueError(f"Expected dropout from 0 to less than 1 (got {dropout})")


def softmax(score: Tensor, starts: Tensor) -> Tensor:
    """Return the softmax of scores over the edges of each row.

    Args:
        score: [E, H], sorted by row.
        starts: The first edge of each row, int64 [R + 1].
    """
    owners, rows = owners_of(starts, len(score)), len(starts) - 1
    maximum = score.new_full((rows, score.size(1)), -torch.inf)
    # The maximum cancels, so it needs no gradient.
    maximum.scatter_reduce_(0, owners.unsqueeze(1).expand_as(score), score.detach(), "amax")
    exponential = (score - maximum[owners]).exp()
    total = torch.zeros_like(maximum).index_add(0, owners, exponential) + 1e-16
    return exponential / total[owners]


def softmax_backward(gradient: Tensor, weight: Tensor, starts: Tensor) -> Tensor:
    """Return the gradient of the scores [E, H], given the weights and their gradient."""
    owners, rows = owners_of(starts, len(weight)), len(starts) - 1
    mean = weight.new_zeros(rows, weight.size(1)).index_add_(0, owners, weight * gradient)
    return weight * (gradient - mean[owners])


def dropped_of(dropout: float) -> int:
    """Return the threshold below which 16 random bits drop a weight, out of :data:`GRAINS`."""
    return min(round(dropout * GRAINS), GRAINS - 1)


def dropout_factor(rows: Tensor, weight: Tensor, dropout: float, seed: int) -> Tensor:
    """Return the factor of dropout for each weight: 0, or the reciprocal of the kept share.

    Args:
        rows: The rows of the weights [E].
        weight: A tensor [*, H] with the heads and dtype of the weights.
        dropout: The probability of 0.
        seed: 64 bits.
    """
    heads = weight.size(1)
    dropped = dropped_of(dropout)
    index = rows.unsqueeze(1) * heads + torch.arange(heads, device=rows.device)
    kept = noise16(index, seed) >= dropped
    return kept.to(weight.dtype) * (GRAINS / (GRAINS - dropped))


def places_of(weight_places: Tensor | None, edges: int, device: torch.device) -> Tensor:
    """Return the row of each edge's weight, int64 [E]."""
    if weight_places is None:
        return torch.arange(edges, device=device)
    return weight_places.long()
