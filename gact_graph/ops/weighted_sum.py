"""Sums of weighted rows over the edges of each node, without messages.

For the edges :math:`e` of each of R rows, with heads :math:`h` that share the columns evenly,

.. math::
    out_{r, h} = \\sum_{e \\in r} w_{q(e), h} \\, x_{p(e), h},

and the gradients of :math:`w` and of :math:`x`. The E edges are sorted by row: row r has the edges
``starts[r] - starts[0]`` to ``starts[r + 1] - starts[0]``. All tensors are contiguous, on one
device, and of one floating-point type. Results do not depend on the number of threads.

The gradient of :math:`x` is a sum of the same kind over the edges sorted by source: weights times
rows of the gradient of ``out`` at the destinations.
"""

from __future__ import annotations

from typing import Final

import torch

from gact_graph.ops import cpu, cuda_edges
from gact_graph.ops.reference import weighted_sum as reference
from gact_graph.ops.registration import dispatched

weighted_sum: Final = dispatched(reference.weighted_sum)
weighted_sum_weights: Final = dispatched(reference.weighted_sum_weights)
weighted_sum_backward: Final = dispatched(reference.weighted_sum_backward)


def makes_messages(device: torch.device) -> bool:
    """Return whether the operators materialize rows of edges [E, W] on a device.

    If so, call them with a part of the edges at a time.
    """
    if device.type == "cuda":
        return cuda_edges.load(device) is None
    return device.type != "cpu" or cpu.load() is None
