"""Attention weights from dot products in plain torch: the oracle of the kernels, and what
runs without them."""

from __future__ import annotations

import torch
from torch import Tensor

from gact_graph.ops.checks import check_edges, check_matrix, check_range, check_tensor
from gact_graph.ops.reference.edges import owners_of
from gact_graph.ops.reference.softmax import (
    check_attended,
    check_dropout,
    kept,
    places_of,
    softmax,
    softmax_backward,
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
    check_dot_attention(out, source, destination, terms, places, weight_places, starts)
    product = source.index_select(0, places) * destination[owners_of(starts, places.numel())]
    score = product.view(len(product), out.size(1), source.size(1) // out.size(1)).sum(-1)
    weight = softmax((score if terms is None else score + terms) * scale, starts)
    out.index_copy_(0, places_of(weight_places, len(weight), weight.device), weight)


def dot_attention_backward(
    gradient: Tensor, weight: Tensor, places: Tensor | None, starts: Tensor, scale: float
) -> None:
    edges = check_dot_attention_backward(gradient, weight, places, starts)
    at = places_of(places, edges, gradient.device)
    gradient[at] = softmax_backward(gradient[at], weight[at], starts) * scale


def drop_weights(weight: Tensor, dropout: float, seed: int) -> None:
    check_drop_weights(weight, dropout)
    weight.mul_(kept(torch.arange(len(weight), device=weight.device), weight, dropout, seed))


def written_out(
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
    """The sums of values weighed by attention [R, H, C], and the weights before dropout [E, H] at
    their places, as tensors that autograd differentiates as often as wished.

    Args:
        source: [N, H, C].
        destination: [R, H, C].
        value: [N, H, C].
        rows: What each edge adds to its source and its value [E, H, C], in the order of the edges;
            None for nothing.
        places: As for :func:`dot_attention`, and so are the other arguments.
        weight_places: See there.
        starts: See there.
        scale: See there.
        dropout: As for :func:`drop_weights`.
        seed: See there.
    """
    owners = owners_of(starts, places.numel())
    keys, values = source.index_select(0, places), value.index_select(0, places)
    if rows is not None:
        keys, values = keys + rows, values + rows
    weight = softmax((keys * destination[owners]).sum(-1) * scale, starts)
    at = places_of(weight_places, places.numel(), weight.device)
    left = weight * kept(at, weight, dropout, seed)
    out = torch.zeros_like(destination).index_add(0, owners, values * left.unsqueeze(-1))
    return out, torch.zeros_like(weight).index_copy(0, at, weight)


def check_dot_attention(
    out: Tensor,
    source: Tensor,
    destination: Tensor,
    terms: Tensor | None,
    places: Tensor,
    weight_places: Tensor | None,
    starts: Tensor,
) -> None:
    """Raises unless these are what :func:`dot_attention` takes."""
    check_matrix("out", out, None, source.device)
    check_matrix("source", source, out.size(1), source.device)
    edges = places, weight_places, starts
    check_attended(source, destination, out.size(1), *edges, 0.0, out, "out")
    if terms is not None:
        check_tensor("terms", terms, source.dtype, [places.numel(), out.size(1)], source.device)


def check_dot_attention_backward(
    gradient: Tensor, weight: Tensor, places: Tensor | None, starts: Tensor
) -> int:
    """The same for :func:`dot_attention_backward`; returns the number of edges."""
    check_matrix("gradient", gradient, None, gradient.device)
    check_tensor("weight", weight, gradient.dtype, [*gradient.shape], gradient.device)
    edges = gradient.size(0) if places is None else places.numel()
    check_edges(places, starts, edges, gradient.device)
    if places is not None:
        check_range("places", places, gradient.size(0) - 1)
    return edges


def check_drop_weights(weight: Tensor, dropout: float) -> None:
    """The same for :func:`drop_weights`."""
    check_matrix("weight", weight, None, weight.device)
    check_dropout(dropout)
