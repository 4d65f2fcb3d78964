"""Sums of weighted rows, without the messages: what most layers do with what lies at the sources.

For the edges :math:`e` of each of R rows, with heads :math:`h` that share the columns evenly,

.. math::
    out_{r, h} = \\sum_{e \\in r} w_{q(e), h} \\, x_{p(e), h},

and the gradients of :math:`w` and of :math:`x`. The E edges are sorted by row: those of row r are
``starts[r] - starts[0]`` to ``starts[r + 1] - starts[0]``. All tensors are of one floating-point
type, contiguous, and on one device. Results do not depend on the number of threads.

The gradient of :math:`x` is a sum of the same kind, over the edges sorted by their sources: weights
times rows of the gradient of ``out`` at the destinations.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from gact_graph.ops import cpu, cuda_edges
from gact_graph.ops.reference import weighted_sum as reference

torch.library.define(
    "gact_graph::weighted_sum",
    "(Tensor(a!) out, Tensor x, Tensor? places, Tensor weight, Tensor? weight_places,"
    " Tensor starts) -> ()",
)
torch.library.define(
    "gact_graph::weighted_sum_weights",
    "(Tensor gradient, Tensor x, Tensor? places, Tensor starts, int heads) -> Tensor",
)
torch.library.define(
    "gact_graph::weighted_sum_backward",
    "(Tensor(a!) of_x, Tensor(b!) of_weight, Tensor gradient, Tensor x, Tensor places,"
    " Tensor weight, Tensor weight_places, Tensor starts) -> ()",
)
torch.library.impl("gact_graph::weighted_sum", "default", reference.weighted_sum)
torch.library.impl("gact_graph::weighted_sum_weights", "default", reference.weighted_sum_weights)
torch.library.impl("gact_graph::weighted_sum_backward", "default", reference.weighted_sum_backward)


@torch.library.impl("gact_graph::weighted_sum", "cpu")
def _sum_cpu(*args: Any) -> None:
    (cpu.load() or reference).weighted_sum(*args)


@torch.library.impl("gact_graph::weighted_sum_weights", "cpu")
def _weights_cpu(*args: Any) -> Tensor:
    return (cpu.load() or reference).weighted_sum_weights(*args)


@torch.library.impl("gact_graph::weighted_sum_backward", "cpu")
def _backward_cpu(*args: Any) -> None:
    (cpu.load() or reference).weighted_sum_backward(*args)


@torch.library.impl("gact_graph::weighted_sum", "cuda")
def _sum_cuda(out: Tensor, *args: Any) -> None:
    (cuda_edges.load(out.device) or reference).weighted_sum(out, *args)


@torch.library.impl("gact_graph::weighted_sum_weights", "cuda")
def _weights_cuda(gradient: Tensor, *args: Any) -> Tensor:
    return (cuda_edges.load(gradient.device) or reference).weighted_sum_weights(gradient, *args)


@torch.library.impl("gact_graph::weighted_sum_backward", "cuda")
def _backward_cuda(of_x: Tensor, *args: Any) -> None:
    (cuda_edges.load(of_x.device) or reference).weighted_sum_backward(of_x, *args)


def makes_messages(device: torch.device) -> bool:
    """Whether the operators make tensors [E, W] on this device: they should get a part of the edges
    at a time."""
    if device.type == "cuda":
        return cuda_edges.load(device) is None
    return device.type != "cpu" or cpu.load() is None


def weighted_sum(
    out: Tensor,
    x: Tensor,
    places: Tensor | None,
    weight: Tensor,
    weight_places: Tensor | None,
    starts: Tensor,
) -> None:
    """Write the sums into ``out`` [R, W].

    Args:
        out: Zeros where a row has no edges.
        x: [N, W].
        places: p, int32 or int64 [E]; None: edge e reads row e, and N is E.
        weight: [K, H], where H divides W.
        weight_places: q, of the type of p [E]; None: edge e has weight e, and K is E.
        starts: int64 [R + 1].

    Raises:
        TypeError: A tensor is of another dtype or layout.
        ValueError: A tensor is of another shape or device, or not contiguous; the heads do not
            share the columns evenly; or (on the CPU) the starts decrease or do not span the edges.
        IndexError: A place is none of the N or K (on the CPU).
    """
    torch.ops.gact_graph.weighted_sum(out, x, places, weight, weight_places, starts)


def weighted_sum_weights(
    gradient: Tensor, x: Tensor, places: Tensor | None, starts: Tensor, heads: int
) -> Tensor:
    """The gradient of weights [E, H] in the order of edges, from that of the sums [R, W]."""
    found: Tensor = torch.ops.gact_graph.weighted_sum_weights(gradient, x, places, starts, heads)
    return found


def weighted_sum_backward(
    of_x: Tensor,
    of_weight: Tensor,
    gradient: Tensor,
    x: Tensor,
    places: Tensor,
    weight: Tensor,
    weight_places: Tensor,
    starts: Tensor,
) -> None:
    """Write both gradients, in one pass over edges that are sorted by their sources.

    Args:
        of_x: The gradient of x [R, W]; zeros where a source has no edges.
        of_weight: The gradient of weight [K, H]; only the weights of these edges are written.
        gradient: That of the sums [D, W].
        x: [R, W].
        places: The destination of each edge, int32 or int64 [E].
        weight: [K, H].
        weight_places: The weight of each edge, of the same type [E]; each weight has one edge.
        starts: int64 [R + 1].

    Raises:
        TypeError, ValueError, IndexError: As :func:`weighted_sum`.
    """
    torch.ops.gact_graph.weighted_sum_backward(
        of_x, of_weight, gradient, x, places, weight, weight_places, starts
    )
