"""What stock autograd would save in a call that runs in blocks, found out on a small graph.

A tensor that edge work makes is as long as the edges, as the destination nodes, or as neither. So
what three small blocks save tells what a graph of any size does.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.multiprocessing.reductions import StorageWeakRef

from gact_graph.layers.blocks.cuts import Block
from gact_graph.layers.blocks.edge_functions import EdgeFunction
from gact_graph.layers.blocks.sample import Sample, blocks_of
from gact_graph.support.replica import Replica, Snapshot
from gact_graph.support.run_state import RunState
from gact_graph.support.storage import key_of, parts_of, tensors_held_by


@dataclass(frozen=True)
class StockSaves:
    """What stock autograd would save.

    Attributes:
        by_edge: Bytes for each edge of tensors that the call makes.
        by_node: Bytes for each destination node.
        fixed: Bytes whatever the graph.
        arguments: Indices of the tensors in ``Arguments.tensors`` that it saves as they are.
        edge_index: Whether it saves the ends of the edges.
        result: Whether it saves the result of the call.
        attributes: The attributes in which the layer leaves a tensor that it saves.
    """

    by_edge: float = 0.0
    by_node: float = 0.0
    fixed: float = 0.0
    arguments: frozenset[int] = frozenset()
    edge_index: bool = False
    result: bool = False
    attributes: frozenset[str] = frozenset()

    def nbytes(self, num_edges: int, num_destinations: int) -> int:
        """Bytes of the tensors that the call makes, without its arguments and its result."""
        return round(self.by_edge * num_edges + self.by_node * num_destinations + self.fixed)


def stock_saves(
    snapshot: Snapshot,
    edge_function: EdgeFunction,
    sample: Sample,
    learns: Sequence[bool],
    kept: Sequence[str],
) -> StockSaves | None:
    """What stock autograd would save; None if it cannot be told.

    Args:
        snapshot: Of the layer.
        edge_function: What runs for all edges at once.
        sample: A small graph with rows of a call's tensors.
        learns: For each tensor whether it needs a gradient.
        kept: Attributes in which the layer leaves a tensor of edges.
    """
    arguments, found = sample.arguments, _Found()
    run_state = RunState({t.device.type for t in arguments.tensors})
    blocks = (sample.whole, *blocks_of(sample, edgeless=False))
    with snapshot.replica(own=True) as replica, run_state.restored():
        try:
            nbytes = [
                _saved_in(replica, edge_function, sample, block, learns, kept, found)
                for block in blocks
            ]
        except torch.OutOfMemoryError:
            raise
        except Exception:
            return None
    sizes = [[block.num_edges, block.num_nodes, 1] for block in blocks]
    of_blocks = torch.tensor(sizes, dtype=torch.float64, device="cpu")
    saved = torch.tensor(nbytes, dtype=torch.float64, device="cpu")
    by_edge, by_node, fixed = torch.linalg.solve(of_blocks, saved).tolist()
    gathers = any(
        learns[use.index] for use in arguments.uses if use.level in ("source", "destination")
    )
    return StockSaves(
        by_edge,
        by_node,
        fixed,
        frozenset(found.arguments),
        found.edge_index or gathers,
        found.result,
        frozenset(found.attributes),
    )


@dataclass
class _Found:
    """See :class:`StockSaves`."""

    arguments: set[int] = field(default_factory=set)
    edge_index: bool = False
    result: bool = False
    attributes: set[str] = field(default_factory=set)


def _saved_in(
    replica: Replica,
    edge_function: EdgeFunction,
    sample: Sample,
    block: Block,
    learns: Sequence[bool],
    kept: Sequence[str],
    found: _Found,
) -> int:
    """Bytes of the tensors that are made and saved in one block; notes in ``found`` the others."""
    saved: dict[StorageWeakRef, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        for part in parts_of(tensor):
            saved[key_of(part)] = part.untyped_storage().nbytes()
        return tensor

    module: Any = replica.module
    arguments = sample.arguments
    with saved_tensors_hooks(pack, lambda tensor: tensor):
        given, _ = arguments.part(arguments.tensors, sample.order, block, learns)
        out = edge_function(module, given)
    for use in arguments.uses:
        of_call = use.level in ("node", "edge", "whole")
        if of_call and saved.pop(key_of(given[use.parameter]), None) is not None:
            found.arguments.add(use.index)
    for name in ("index", "edge_index_i", "edge_index_j"):
        found.edge_index |= saved.pop(key_of(given[name]), None) is not None
    for name in kept:
        if saved.pop(key_of(getattr(module, name)), None) is not None:
            found.attributes.add(name)
    found.result |= saved.pop(key_of(out), None) is not None
    for tensor in tensors_held_by(module):
        saved.pop(key_of(tensor), None)
    return sum(saved.values())
