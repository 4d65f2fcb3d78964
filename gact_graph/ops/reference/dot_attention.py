"""Attention weights from dot products, in pure torch: see :mod:`gact_graph.ops.dot_attention`."""

from __future__ import annotations

import torch
from torch import Tensor

from gact_graph.ops.reference.edges import (
    dropout_factor,
    owners_of,
    softmax,
    softmax_backward,
    weight_rows,
)
from gact_graph.ops.registration import operator


@operator(
    mutates=("out",),
    shapes="source: N W, places: E < N, starts: R + 1, destination: R W, weight_places: E < K, "
    "out: K H, terms: E H",
)
def dot_attention(
    out: Tensor,
    source: Tensor,
    destination: Tensor,
    terms: Tensor | None,
    places: Tensor,
    weight_places: Tensor | None,
    starts: Tensor,
    scale: float,
) -> None:
    """Write the attention weights w into ``out``, and leave rows that belong to no edge unchanged.

    Args:
        out: The weights [K, H].
        source: The rows a of the sources [N, H * C].
        destination: The rows b of the destinations [R, H * C].
        terms: The terms t of the edges [E, H], in the order of edges; None for none.
        places: The source p of each edge, int32 or int64 [E].
        weight_places: The row q of each edge's weight, of the same type [E]; None if edge e has
            row e, and K is E.
        starts: The first edge of each destination, int64 [R + 1].
        scale: The factor of dot products and terms.
    """
    product = source.index_select(0, places) * destination[owners_of(starts, places.numel())]
    score = product.view(len(product), out.size(1), source.size(1) // out.size(1)).sum(-1)
    weight = softmax((score if terms is None else score + terms) * scale, starts)
    out.index_copy_(0, weight_rows(weight_places, len(weight), weight.device), weight)


@operator(
    mutates=("gradient",),
    shapes="gradient: K H, weight: K H, places: E < K, starts: R + 1",
)
def dot_attention_backward(
    gradient: Tensor, weight: Tensor, places: Tensor | None, starts: Tensor, scale: float
) -> None:
    """Replace the gradient of the weights by the gradient of dot products and terms.

    Args:
        gradient: The gradient of w [K, H]; rows that belong to no edge are left unchanged.
        weight: w [K, H].
        places: The row q of each edge's weight, int32 or int64 [E], without duplicates; None if
            edge e has row e, and K is E.
        starts: The first edge of each destination, int64 [R + 1].
        scale: As for :func:`dot_attention`.
    """
    rows = weight_rows(places, len(gradient), gradient.device)
    gradient[rows] = softmax_backward(gradient[rows], weight[rows], starts) * scale


@operator(mutates=("weight",), shapes="weight: K H")
def drop_weights(weight: Tensor, dropout: float, seed: int) -> None:
    """Apply the dropout of :mod:`gact_graph.ops.attention` to weights or their gradients in place.

    Args:
        weight: [K, H].
        dropout: The probability that a weight becomes 0, from 0 to less than 1.
        seed: The seed of dropout, 64 bits.
    """
    rows = torch.arange(len(weight), device=weight.device)
    weight.mul_(dropout_factor(rows, weight, dropout, seed))


def differentiable_dot_attention(
    source: Tensor,
    destination: Tensor,
    value: Tensor,
    rows: Tensor | None,
    places: Tensor,
    weight_places: Tensor | None,
    starts: Tensor,
    scale: float,
    dropout: float,
    seed: int,
) -> tuple[Tensor, Tensor]:
    """Return attention's output and weights as tensors that autograd differentiates, to any order.

    Args:
        source: [N, H, C].
        destination: [R, H, C].
        value: [N, H, C].
        rows: The rows that edges add to their source and value [E, H, C], in the order of edges;
            None for none.
        places, weight_places, starts, scale: As for :func:`dot_attention`.
        dropout, seed: As for :func:`drop_weights`.

    Returns:
        The weighted sums of the values [R, H, C], and the weights before dropout [E, H].
    """
    owners = owners_of(starts, places.numel())
    keys, values = source.index_select(0, places), value.index_select(0, places)
    if rows is not None:
        keys, values = keys + rows, values + rows
    weight = softmax((keys * destination[owners]).sum(-1) * scale, starts)
    of_weights = weight_rows(weight_places, places.numel(), weight.device)
    dropped = weight * dropout_factor(of_weights, weight, dropout, seed)
    out = torch.zeros_like(destination).index_add(0, owners, values * dropped.unsqueeze(-1))
    return out, torch.zeros_like(weight).index_copy(0, of_weights, weight)
