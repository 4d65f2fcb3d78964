"""Attention weights from the rows of nodes: what GATv2 computes for its edges.

For the edges :math:`e` of each of R destinations, with heads :math:`h` of C columns :math:`c`,

.. math::
    s_{e, h} = \\sum_c v_{h, c} \\mathrm{LeakyReLU}(a_{p(e), h, c} + b_{r(e), h, c}), \\qquad
    w_{q(e), h} = d_{q(e), h} \\exp(s_{e, h}) \\Big/ \\sum_{f \\in r(e)} \\exp(s_{f, h})

(Brody et al., `How Attentive are Graph Attention Networks? <https://arxiv.org/abs/2105.14491>`_,
equation 7). Edges, weights and dropout are those of :mod:`gact_graph.ops.attention`, and so is what
is said there of tensors and threads. Kernels make no row of an edge.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from gact_graph.ops import cpu, cuda_edges
from gact_graph.ops.reference import leaky_attention as reference

_GIVEN = "Tensor source, Tensor destination, Tensor att"
_EDGES = "Tensor places, Tensor? weight_places, Tensor starts"
_SETTINGS = "float slope, float dropout, int seed"
torch.library.define(
    "gact_graph::leaky_attention", f"(Tensor(a!) out, {_GIVEN}, {_EDGES}, {_SETTINGS}) -> ()"
)
torch.library.define(
    "gact_graph::leaky_attention_backward",
    "(Tensor(a!) of_score, Tensor(b!) of_destination, Tensor(c!) of_att, Tensor gradient,"
    f" {_GIVEN}, {_EDGES}, {_SETTINGS}) -> ()",
)
torch.library.define(
    "gact_graph::leaky_attention_source",
    f"(Tensor(a!) of_source, Tensor of_score, {_GIVEN}, Tensor places, Tensor weight_places,"
    " Tensor starts, float slope) -> ()",
)
torch.library.impl("gact_graph::leaky_attention", "default", reference.leaky_attention)
torch.library.impl(
    "gact_graph::leaky_attention_backward", "default", reference.leaky_attention_backward
)
torch.library.impl(
    "gact_graph::leaky_attention_source", "default", reference.leaky_attention_source
)


@torch.library.impl("gact_graph::leaky_attention", "cpu")
def _attention_cpu(*args: Any) -> None:
    (cpu.load() or reference).leaky_attention(*args)


@torch.library.impl("gact_graph::leaky_attention_backward", "cpu")
def _backward_cpu(*args: Any) -> None:
    (cpu.load() or reference).leaky_attention_backward(*args)


@torch.library.impl("gact_graph::leaky_attention_source", "cpu")
def _source_cpu(*args: Any) -> None:
    (cpu.load() or reference).leaky_attention_source(*args)


@torch.library.impl("gact_graph::leaky_attention", "cuda")
def _attention_cuda(out: Tensor, *args: Any) -> None:
    (cuda_edges.load(out.device) or reference).leaky_attention(out, *args)


@torch.library.impl("gact_graph::leaky_attention_backward", "cuda")
def _backward_cuda(of_score: Tensor, *args: Any) -> None:
    (cuda_edges.load(of_score.device) or reference).leaky_attention_backward(of_score, *args)


@torch.library.impl("gact_graph::leaky_attention_source", "cuda")
def _source_cuda(of_source: Tensor, *args: Any) -> None:
    (cuda_edges.load(of_source.device) or reference).leaky_attention_source(of_source, *args)


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
    """Write the weights w into ``out`` [K, H]; those that no edge has are left as they are.

    Args:
        out: [K, H].
        source: a [N, H * C].
        destination: b [R, H * C].
        att: v [H, C].
        places: The source p of each edge, int32 or int64 [E].
        weight_places: The place q of each edge's weight, of the same type [E]; None: edge e has
            weight e, and K is E.
        starts: int64 [R + 1].
        slope: Of LeakyReLU for negative sums.
        dropout: The share of weights that become 0, from 0 to less than 1.
        seed: Of dropout, 64 bits.

    Raises:
        TypeError: A tensor is of another dtype or layout.
        ValueError: A tensor is of another shape or device, or not contiguous; dropout is out of its
            range; or (on the CPU) the starts decrease or do not span the edges.
        IndexError: A place is none of the N or K (on the CPU).
    """
    torch.ops.gact_graph.leaky_attention(
        out, source, destination, att, places, weight_places, starts, slope, dropout, seed
    )


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
    """Write the gradients of scores, of ``destination`` and of ``att``.

    Args:
        of_score: The gradient of s for each edge, at the places of its weight [K, H]:
            :func:`leaky_attention_source` finds the gradient of ``source`` from it.
        of_destination: [R, H * C].
        of_att: [H, C].
        gradient: That of the weights [K, H].
        source: As for :func:`leaky_attention`, and so are all that follow.
        destination: See there.
        att: See there.
        places: See there.
        weight_places: See there.
        starts: See there.
        slope: See there.
        dropout: See there.
        seed: See there.

    Raises:
        TypeError, ValueError, IndexError: As :func:`leaky_attention`.
    """
    torch.ops.gact_graph.leaky_attention_backward(
        of_score, of_destination, of_att, gradient, source, destination, att, places,
        weight_places, starts, slope, dropout, seed,
    )  # fmt: skip


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
    """Write the gradient of ``source``, in one pass over edges that are sorted by their sources.

    Args:
        of_source: [R, H * C]; zeros where a source has no edges.
        of_score: The gradient of s [K, H].
        source: a [R, H * C].
        destination: b [D, H * C].
        att: v [H, C].
        places: The destination of each edge, int32 or int64 [E].
        weight_places: The place of each edge's score, of the same type [E].
        starts: int64 [R + 1].
        slope: Of LeakyReLU.

    Raises:
        TypeError, ValueError, IndexError: As :func:`leaky_attention`.
    """
    torch.ops.gact_graph.leaky_attention_source(
        of_source, of_score, source, destination, att, places, weight_places, starts, slope
    )
