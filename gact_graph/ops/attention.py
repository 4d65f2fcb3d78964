"""Attention weights from the scores of nodes: what GAT computes for its edges.

For the edges :math:`e` of each of R destinations, with heads :math:`h`,

.. math::
    s_{e, h} = \\mathrm{LeakyReLU}(a_{p(e), h} + b_{r(e), h} + c_{q(e), h}), \\qquad
    w_{q(e), h} = d_{q(e), h} \\exp(s_{e, h}) \\Big/ \\sum_{f \\in r(e)} \\exp(s_{f, h}),

where :math:`d` is dropout, and :math:`c` is what edges add if they have features (Velickovic et
al., `Graph Attention Networks <https://arxiv.org/abs/1710.10903>`_, section 2.1). The E edges are
sorted by destination: those of destination r are ``starts[r] - starts[0]`` to
``starts[r + 1] - starts[0]``. All tensors are of one floating-point type, contiguous, and on
one device. Results do not depend on the number of threads.

Dropout is a pure function of the seed and the place of a weight, in steps of :math:`2^{-16}`, so
backward finds it again. Its expectation is 1.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from gact_graph.ops import cpu, cuda_edges
from gact_graph.ops.reference import attention as reference

_EDGES = "Tensor? terms, Tensor places, Tensor? weight_places, Tensor starts"
_SETTINGS = "float slope, float dropout, int seed"
torch.library.define(
    "gact_graph::attention",
    f"(Tensor(a!) out, Tensor source, Tensor destination, {_EDGES}, {_SETTINGS}) -> ()",
)
torch.library.define(
    "gact_graph::attention_backward",
    "(Tensor(a!) of_score, Tensor(b!) of_destination, Tensor gradient, Tensor source,"
    f" Tensor destination, {_EDGES}, {_SETTINGS}) -> ()",
)
torch.library.define(
    "gact_graph::segment_sum", "(Tensor(a!) out, Tensor x, Tensor places, Tensor starts) -> ()"
)
torch.library.impl("gact_graph::attention", "default", reference.attention)
torch.library.impl("gact_graph::attention_backward", "default", reference.attention_backward)
torch.library.impl("gact_graph::segment_sum", "default", reference.segment_sum)


@torch.library.impl("gact_graph::attention", "cpu")
def _attention_cpu(*args: Any) -> None:
    (cpu.load() or reference).attention(*args)


@torch.library.impl("gact_graph::attention_backward", "cpu")
def _backward_cpu(*args: Any) -> None:
    (cpu.load() or reference).attention_backward(*args)


@torch.library.impl("gact_graph::segment_sum", "cpu")
def _segment_sum_cpu(*args: Any) -> None:
    (cpu.load() or reference).segment_sum(*args)


@torch.library.impl("gact_graph::attention", "cuda")
def _attention_cuda(out: Tensor, *args: Any) -> None:
    (cuda_edges.load(out.device) or reference).attention(out, *args)


@torch.library.impl("gact_graph::attention_backward", "cuda")
def _backward_cuda(of_score: Tensor, *args: Any) -> None:
    (cuda_edges.load(of_score.device) or reference).attention_backward(of_score, *args)


@torch.library.impl("gact_graph::segment_sum", "cuda")
def _segment_sum_cuda(out: Tensor, *args: Any) -> None:
    (cuda_edges.load(out.device) or reference).segment_sum(out, *args)


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
    """Write the weights w into ``out`` [K, H]; those that no edge has are left as they are.

    Args:
        out: [K, H].
        source: a [N, H].
        destination: b [R, H].
        terms: c [K, H], each edge's at the place of its weight; None for none.
        places: The source p of each edge, int32 or int64 [E].
        weight_places: The place q of each edge's weight, of the same type [E]; None: edge e has
            weight e, and K is E.
        starts: int64 [R + 1].
        slope: Of LeakyReLU for negative scores.
        dropout: The share of weights that become 0, from 0 to less than 1.
        seed: Of dropout, 64 bits.

    Raises:
        TypeError: A tensor is of another dtype or layout.
        ValueError: A tensor is of another shape or device, or not contiguous; dropout is out of its
            range; or (on the CPU) the starts decrease or do not span the edges.
        IndexError: A place is none of the N or K (on the CPU).
    """
    torch.ops.gact_graph.attention(
        out, source, destination, terms, places, weight_places, starts, slope, dropout, seed
    )


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
    """Write the gradients of what the edges add up and of ``destination``.

    Args:
        of_score: The gradient of a + b + c for each edge, at the places of its weight [K, H]: that
            of ``terms``, whose :func:`segment_sum` by source is the gradient of ``source``.
        of_destination: [R, H].
        gradient: That of the weights [K, H].
        source: As for :func:`attention`, and so are all that follow.
        destination: See there.
        terms: See there.
        places: See there.
        weight_places: See there.
        starts: See there.
        slope: See there.
        dropout: See there.
        seed: See there.

    Raises:
        TypeError, ValueError, IndexError: As :func:`attention`.
    """
    torch.ops.gact_graph.attention_backward(
        of_score, of_destination, gradient, source, destination, terms, places, weight_places,
        starts, slope, dropout, seed,
    )  # fmt: skip


def segment_sum(out: Tensor, x: Tensor, places: Tensor, starts: Tensor) -> None:
    """Write the sums of the rows x [N, W] at the places of each row's edges into ``out`` [R, W].

    Args:
        out: Zeros where a row has no edges.
        x: [N, W].
        places: int32 or int64 [E].
        starts: int64 [R + 1]; the edges of row r are ``starts[r] - starts[0]`` and on.

    Raises:
        TypeError, ValueError, IndexError: As :func:`attention`.
    """
    torch.ops.gact_graph.segment_sum(out, x, places, starts)
