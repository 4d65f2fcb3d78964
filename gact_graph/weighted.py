"""Sums of weighted rows, without the messages: what most layers do with what lies at the sources.

For the arcs :math:`e` of each of R rows, with heads :math:`h` that share the columns evenly,

.. math::
    out_{r, h} = \\sum_{e \\in r} w_{e, h} \\, x_{p(e), h},

and the gradients of :math:`w` and of :math:`x`. The A arcs are sorted by row: those of row r are
``starts[r] - starts[0]`` to ``starts[r + 1] - starts[0]``. All tensors are of one floating-point
type, contiguous, and on one device.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from gact_graph.kernels import cpu
from gact_graph.kernels import weighted_reference as reference

torch.library.define(
    "gact_graph::weighted_sum",
    "(Tensor(a!) out, Tensor x, Tensor? places, Tensor weight, Tensor starts) -> ()",
)
torch.library.define(
    "gact_graph::weighted_sum_weights",
    "(Tensor gradient, Tensor x, Tensor? places, Tensor starts, int heads) -> Tensor",
)
torch.library.define(
    "gact_graph::weighted_sum_rows",
    "(Tensor(a!) total, Tensor gradient, Tensor places, Tensor weight, Tensor starts) -> ()",
)
torch.library.impl("gact_graph::weighted_sum", "default", reference.weighted_sum)
torch.library.impl("gact_graph::weighted_sum_weights", "default", reference.weighted_sum_weights)
torch.library.impl("gact_graph::weighted_sum_rows", "default", reference.weighted_sum_rows)


@torch.library.impl("gact_graph::weighted_sum", "cpu")
def _sum_cpu(*args: Any) -> None:
    (cpu.load() or reference).weighted_sum(*args)


@torch.library.impl("gact_graph::weighted_sum_weights", "cpu")
def _weights_cpu(*args: Any) -> Tensor:
    return (cpu.load() or reference).weighted_sum_weights(*args)


@torch.library.impl("gact_graph::weighted_sum_rows", "cpu")
def _rows_cpu(*args: Any) -> None:
    (cpu.load() or reference).weighted_sum_rows(*args)


def weighted_sum(
    out: Tensor, x: Tensor, places: Tensor | None, weight: Tensor, starts: Tensor
) -> None:
    """Write the sums into ``out`` [R, W].

    Args:
        out: Zeros where a row has no arcs.
        x: [N, W].
        places: p, int32 or int64 [A]; None: arc e reads row e, and N is A.
        weight: [A, H], where H divides W.
        starts: int64 [R + 1].

    Raises:
        IndexError: A place is none of the N (on the CPU).
    """
    torch.ops.gact_graph.weighted_sum(out, x, places, weight, starts)


def weighted_sum_weights(
    gradient: Tensor, x: Tensor, places: Tensor | None, starts: Tensor, heads: int
) -> Tensor:
    """The gradient of ``weight`` [A, H], from that of the sums [R, W]."""
    found: Tensor = torch.ops.gact_graph.weighted_sum_weights(gradient, x, places, starts, heads)
    return found


def weighted_sum_rows(
    total: Tensor, gradient: Tensor, places: Tensor, weight: Tensor, starts: Tensor
) -> None:
    """Add the gradient of ``x`` to ``total`` [N, W], from that of the sums [R, W]."""
    torch.ops.gact_graph.weighted_sum_rows(total, gradient, places, weight, starts)
