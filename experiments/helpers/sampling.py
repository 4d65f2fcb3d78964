"""The nodes that a process trains on: mini-batches of a graph, or a part of it."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterator
from dataclasses import replace

import torch
from torch import Tensor
from torch_geometric.data import Data
from torch_geometric.loader import NeighborLoader
from torch_geometric.utils import remove_self_loops, subgraph

import gact_graph
from experiments.helpers.data import NodeTask, normalized
from experiments.helpers.errors import UsageError
from gact_graph.layers.halo.parts import in_order, owners

SAMPLERS = ("cluster", "neighbor")

CLUSTERS, _TOGETHER = 40, 5
"""Clusters of a graph, and clusters of a batch."""

_SEEDS, _NEIGHBORS = 1024, 10
"""Training nodes of a batch, and sampled neighbors of a node in each layer."""

BATCHES = {
    "cluster": (20, 10, _TOGETHER, 2, 1),
    "neighbor": (16384, 8192, 4096, 2048, _SEEDS, 512, 256),
}
"""Sizes of a batch to try with each sampler, the largest first."""


Sampler = Callable[[int], Iterator[NodeTask]]
"""Returns this rank's batches of one epoch, from the number of the epoch."""


def make_sampler(
    name: str, task: NodeTask, layers: int, rank: int, world: int, size: int | None = None
) -> Sampler:
    """Return a sampler of the training nodes, by its name in :data:`SAMPLERS`.

    Args:
        name: The sampler.
        task: The graph; batches have their adjacency in the same layout.
        layers: The number of layers of the model; neighbors are sampled in each.
        rank: This process.
        world: The number of processes. Each batch belongs to one rank.
        size: The size of a batch in clusters or training nodes. None takes the default.

    Raises:
        UsageError: If PyG cannot sample here.
    """
    if name == "cluster":
        return _clusters(task, rank, world, size or _TOGETHER)
    if not any(map(importlib.util.find_spec, ("pyg_lib", "torch_sparse"))):
        raise UsageError(
            "Expected pyg-lib or torch-sparse for --sampler neighbor (got neither); install one, "
            "or take --sampler cluster"
        )
    return _neighbors(task, layers, rank, world, size or _SEEDS)


def _clusters(task: NodeTask, rank: int, world: int, together: int) -> Sampler:
    """Return a sampler of batches of clusters, drawn anew in each epoch, with all edges within."""
    edges = _edges_of(task.adjacency)
    cluster = owners(edges, task.x.size(0), CLUSTERS)

    def epoch(number: int) -> Iterator[NodeTask]:
        generator = torch.Generator().manual_seed(number)
        batches = torch.randperm(CLUSTERS, generator=generator).split(together)
        for batch in batches[rank::world]:
            chosen = torch.isin(cluster, batch.to(cluster.device))
            nodes = chosen.nonzero().view(-1)
            inside, _ = subgraph(nodes, edges, relabel_nodes=True, num_nodes=len(chosen))
            learns = torch.isin(nodes, task.train_idx).nonzero().view(-1)
            if len(learns):
                yield _part(task, nodes, inside, learns)

    return epoch


def _neighbors(task: NodeTask, layers: int, rank: int, world: int, size: int) -> Sampler:
    """Return a sampler of batches of training nodes, with neighbors that PyG samples for them."""
    data = Data(edge_index=_edges_of(task.adjacency), num_nodes=task.x.size(0))
    own, counts = task.train_idx[rank::world], [_NEIGHBORS] * layers
    loader = NeighborLoader(data, counts, input_nodes=own, batch_size=size, shuffle=True)

    def epoch(number: int) -> Iterator[NodeTask]:
        for batch in loader:
            learns = torch.arange(batch.batch_size, device=batch.n_id.device)
            yield _part(task, batch.n_id, batch.edge_index, learns)

    return epoch


def _edges_of(adjacency: Tensor) -> Tensor:
    """Return ``edge_index`` [2, E]; from a matrix, which is symmetric, without self-loops."""
    if adjacency.layout == torch.strided:
        return adjacency
    return remove_self_loops(adjacency.to_sparse_coo().indices())[0]


def _part(task: NodeTask, nodes: Tensor, edges: Tensor, learns: Tensor) -> NodeTask:
    is_list = task.adjacency.layout == torch.strided
    return replace(
        task,
        x=task.x[nodes],
        y=task.y[nodes],
        adjacency=edges if is_list else normalized(edges, len(nodes)),
        train_idx=learns,
    )


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
        UsageError: If METIS is missing.
    """
    if way == "metis" and importlib.util.find_spec("pymetis") is None:
        raise UsageError(
            "Expected pymetis for --partition metis (got none); pip install pymetis, or take "
            "--partition order"
        )
    owner = in_order(num_nodes, parts, edge_index.device) if way == "order" else None
    graph = Data(edge_index=edge_index, num_nodes=num_nodes)
    return gact_graph.distributed.partition(graph, parts, owner)
