"""One graph over several processes: the part that each of them trains on."""

from __future__ import annotations

import importlib.util
from dataclasses import replace

import torch
from torch import Tensor
from torch_geometric.data import Data

import gact_graph
from experiments.helpers.data import NodeTask
from experiments.helpers.errors import UsageError
from gact_graph.layers.halo.parts import in_order

PARTITIONS = ("metis", "order")
"""Ways to cut a graph: few edges between parts, or consecutive nodes."""


def share_of(task: NodeTask, way: str, rank: int, world: int) -> NodeTask:
    """Return the part of a graph that one process trains on.

    Args:
        task: The whole graph, its adjacency as ``edge_index``.
        way: One of :data:`PARTITIONS`.
        rank: The process.
        world: The number of processes.
    """
    part = cut(task.adjacency, task.x.size(0), way, world)[rank]

    def own(index: Tensor) -> Tensor:
        return torch.isin(part.nodes, index).nonzero().view(-1)

    return replace(
        task,
        x=task.x[part.nodes],
        y=task.y[part.nodes],
        adjacency=part.edge_index,
        train_idx=own(task.train_idx),
        val_idx=own(task.val_idx),
        test_idx=own(task.test_idx),
        part=part,
        learning=len(task.train_idx),
    )


def cut(edge_index: Tensor, num_nodes: int, way: str, parts: int) -> list[Data]:
    """Return the parts of a graph, without features; see :func:`share_of`.

    Raises:
        UsageError: METIS is missing.
    """
    if way == "metis" and importlib.util.find_spec("pymetis") is None:
        raise UsageError(
            "Expected pymetis for --partition metis (got none); pip install pymetis, or take "
            "--partition order"
        )
    owner = in_order(num_nodes, parts, edge_index.device) if way == "order" else None
    graph = Data(edge_index=edge_index, num_nodes=num_nodes)
    return gact_graph.distributed.partition(graph, parts, owner)
