"""Which tensors backward never reads, so that they need not be saved to compute a block again.

The gradient of ``edge_weight * x_j`` reads the weights, and reads ``x_j`` only if the weights
learn; the gradient of a sum reads nothing. Data flow tells which: backward may read values that
autograd saves something of, and values that Python code, or a function that is not PyTorch's own,
has seen.
"""

from __future__ import annotations

from typing import Any

import torch

from gact_graph.layers.blocks.edge_functions import EdgeFunction
from gact_graph.layers.blocks.flow import Flow, is_followed
from gact_graph.layers.blocks.sample import Sample
from gact_graph.support.replica import Snapshot
from gact_graph.support.run_state import RunState


def never_read(
    snapshot: Snapshot,
    edge_function: EdgeFunction,
    sample: Sample,
    learns: list[bool],
    kept: tuple[str, ...],
) -> frozenset[int]:
    """The indices of these tensors in ``Arguments.tensors``.

    Args:
        snapshot: Of the layer.
        edge_function: What backward computes again.
        sample: A small graph with rows of the tensors.
        learns: For each tensor whether it needs a gradient; that decides what is read.
        kept: Attributes in which the layer leaves a tensor of edges.
    """
    arguments, flow = sample.arguments, Flow()
    run_state = RunState({t.device.type for t in arguments.tensors})
    with snapshot.replica(own=True) as replica, run_state.restored():
        module: Any = replica.module
        given, _ = arguments.part(arguments.tensors, sample.order, sample.whole, learns)
        for use in arguments.uses:
            flow.label(given[use.parameter], 1 << use.index)
        try:
            with flow.followed():
                out = edge_function(module, given)
        except torch.OutOfMemoryError:
            raise
        except Exception:
            return frozenset()
        if not is_followed([out, *(getattr(module, name) for name in kept)]):
            return frozenset()
    read = flow.saved | flow.seen
    return frozenset(
        index
        for index, tensor in enumerate(arguments.tensors)
        if tensor.is_floating_point() and tensor.dim() and not read & (1 << index)
    )
