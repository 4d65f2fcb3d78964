"""Attention weights from dot products of rows: what TransformerConv computes for its edges.

For the edges :math:`e` of each of R destinations, with heads :math:`h` of C columns :math:`c`,

.. math::
    s_{e, h} = \\lambda \\Big(t_{e, h} + \\sum_c a_{p(e), h, c} \\, b_{r(e), h, c}\\Big), \\qquad
    w_{q(e), h} = \\exp(s_{e, h}) \\Big/ \\sum_{f \\in r(e)} \\exp(s_{f, h})

(Shi et al., `Masked Label Prediction <https://arxiv.org/abs/2009.03509>`_, equation 3), where
:math:`t` is what edges add if they have features. Edges and weights are those of
:mod:`gact_graph.ops.attention`, and so is what is said there of tensors and threads. Kernels make
no row of an edge.

The gradient of the dot products is one of weights: :mod:`gact_graph.ops.weighted_sum` makes those
of a and b from it. Dropout is a step of its own, because such layers also show their weights as
they are before it.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from gact_graph.ops import cpu, cuda_edges
from gact_graph.ops.reference import dot_attention as reference

torch.library.define(
    "gact_graph::dot_attention",
    "(Tensor(a!) out, Tensor source, Tensor destination, Tensor? terms, Tensor places,"
    " Tensor? weight_places, Tensor starts, float scale) -> ()",
)
torch.library.define(
    "gact_graph::dot_attention_backward",
    "(Tensor(a!) gradient, Tensor weight, Tensor? places, Tensor starts, float scale) -> ()",
)
torch.library.define(
    "gact_graph::drop_weights", "(Tensor(a!) weight, float dropout, int seed) -> ()"
)
torch.library.impl("gact_graph::dot_attention", "default", reference.dot_attention)
torch.library.impl(
    "gact_graph::dot_attention_backward", "default", reference.dot_attention_backward
)
torch.library.impl("gact_graph::drop_weights", "default", reference.drop_weights)


@torch.library.impl("gact_graph::dot_attention", "cpu")
def _attention_cpu(*args: Any) -> None:
    (cpu.load() or reference).dot_attention(*args)


@torch.library.impl("gact_graph::dot_attention_backward", "cpu")
def _backward_cpu(*args: Any) -> None:
    (cpu.load() or reference).dot_attention_backward(*args)


@torch.library.impl("gact_graph::drop_weights", "cpu")
def _drop_cpu(*args: Any) -> None:
    (cpu.load() or reference).drop_weights(*args)


@torch.library.impl("gact_graph::dot_attention", "cuda")
def _attention_cuda(out: Tensor, *args: Any) -> None:
    (cuda_edges.load(out.device) or reference).dot_attention(out, *args)


@torch.library.impl("gact_graph::dot_attention_backward", "cuda")
def _backward_cuda(gradient: Tensor, *args: Any) -> None:
    (cuda_edges.load(gradient.device) or reference).dot_attention_backward(gradient, *args)


@torch.library.impl("gact_graph::drop_weights", "cuda")
def _drop_cuda(weight: Tensor, *args: Any) -> None:
    (cuda_edges.load(weight.device) or reference).drop_weights(weight, *args)


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
    """Write the weights w into ``out`` [K, H]; those that no edge has are left as they are.

    Args:
        out: [K, H].
        source: a [N, H * C].
        destination: b [R, H * C].
        terms: t [E, H], in the order of the edges; None for none.
        places: The source p of each edge, int32 or int64 [E].
        weight_places: The place q of each edge's weight, of the same type [E]; None: edge e has
            weight e, and K is E.
        starts: int64 [R + 1].
        scale: What dot products and terms are multiplied by.

    Raises:
        TypeError: A tensor is of another dtype or layout.
        ValueError: A tensor is of another shape or device, or not contiguous; the heads do not
            share the columns evenly; or (on the CPU) the starts decrease or do not span the edges.
        IndexError: A place is none of the N or K (on the CPU).
    """
    torch.ops.gact_graph.dot_attention(
        out, source, destination, terms, places, weight_places, starts, scale
    )


def dot_attention_backward(
    gradient: Tensor, weight: Tensor, places: Tensor | None, starts: Tensor, scale: float
) -> None:
    """Turn the gradient of weights into that of the dot products and of the terms, in place.

    Args:
        gradient: That of w [K, H]; where no edge has a weight it is left as it is.
        weight: w [K, H].
        places: The place q of each edge's weight, int32 or int64 [E], each once; None: edge e has
            weight e, and K is E.
        starts: int64 [R + 1].
        scale: As for :func:`dot_attention`.

    Raises:
        TypeError, ValueError, IndexError: As :func:`dot_attention`.
    """
    torch.ops.gact_graph.dot_attention_backward(gradient, weight, places, starts, scale)


def drop_weights(weight: Tensor, dropout: float, seed: int) -> None:
    """Multiply weights [K, H], or their gradients, by what dropout makes of 1, in place.

    That is the dropout of :mod:`gact_graph.ops.attention`.

    Args:
        weight: [K, H].
        dropout: The share that becomes 0, from 0 to less than 1.
        seed: Of dropout, 64 bits.

    Raises:
        TypeError, ValueError: As :func:`dot_attention`, or if dropout is out of its range.
    """
    torch.ops.gact_graph.drop_weights(weight, dropout, seed)
