"""Edges sorted by row, where those of row r begin at ``starts[r] - starts[0]``, in pure torch.

Here are the row of each edge, and the softmax and dropout of edges' weights.
"""

from __future__ import annotations

import torch
from torch import Tensor

from gact_graph.ops.reference.quantize import noise16

GRAINS = 1 << 16
"""Dropout compares 16 random bits with a threshold: its probability is a multiple of 1 / GRAINS."""


def owners_of(starts: Tensor, edges: int) -> Tensor:
    """Return the row of each edge, int64 [E].

    Args:
        starts: The first edge of each row, int64 [R + 1].
        edges: The number of edges E.
    """
    return torch.repeat_interleave(starts.diff(), output_size=edges)


def weight_rows(weight_places: Tensor | None, edges: int, device: torch.device) -> Tensor:
    """Return the row of each edge's weight, int64 [E]."""
    if weight_places is None:
        return torch.arange(edges, device=device)
    return weight_places.long()


def attention_weights(
    score: Tensor, weight_places: Tensor | None, starts: Tensor, dropout: float, seed: int
) -> tuple[Tensor, Tensor]:
    """Return the row of each edge's weight [E], and the weights after dropout [E, H].

    Args:
        score: The scores of the edges [E, H].
        weight_places, starts, dropout, seed: As for
            :func:`gact_graph.ops.reference.attention.attention`.
    """
    rows, weight = weight_rows(weight_places, len(score), score.device), softmax(score, starts)
    return rows, weight * dropout_factor(rows, weight, dropout, seed)


def attention_weights_backward(
    gradient: Tensor,
    score: Tensor,
    weight_places: Tensor | None,
    starts: Tensor,
    dropout: float,
    seed: int,
) -> tuple[Tensor, Tensor]:
    """Return the row of each edge's weight [E], and the gradients of the scores [E, H].

    Args:
        gradient: The gradient of the weights [K, H].
        score, weight_places, starts, dropout, seed: As for :func:`attention_weights`.
    """
    rows, weight = weight_rows(weight_places, len(score), score.device), softmax(score, starts)
    of_weight = gradient[rows] * dropout_factor(rows, gradient, dropout, seed)
    return rows, softmax_backward(of_weight, weight, starts)


def softmax(score: Tensor, starts: Tensor) -> Tensor:
    """Return the softmax of scores [E, H] over the edges of each row."""
    owners, rows = owners_of(starts, len(score)), len(starts) - 1
    maximum = score.new_full((rows, score.size(1)), -torch.inf)
    # The maximum cancels, so it needs no gradient.
    maximum.scatter_reduce_(0, owners.unsqueeze(1).expand_as(score), score.detach(), "amax")
    exponential = (score - maximum[owners]).exp()
    total = torch.zeros_like(maximum).index_add(0, owners, exponential) + 1e-16
    return exponential / total[owners]


def softmax_backward(gradient: Tensor, weight: Tensor, starts: Tensor) -> Tensor:
    """Return the gradient of the scores [E, H], from the weights and their gradient."""
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
    heads, dropped = weight.size(1), dropped_of(dropout)
    index = rows.unsqueeze(1) * heads + torch.arange(heads, device=rows.device)
    kept = noise16(index, seed) >= dropped
    return kept.to(weight.dtype) * (GRAINS / (GRAINS - dropped))
