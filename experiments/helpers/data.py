"""Conversion of a loaded graph to the tensors that a model trains on."""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import torch
from torch import Tensor
from torch_geometric.data import Data
from torch_geometric.nn.conv.gcn_conv import gcn_norm
from torch_geometric.utils import to_torch_csr_tensor, to_undirected

from experiments.helpers.errors import ExperimentError

if TYPE_CHECKING:
    from datasets import Graph

Layout = Literal["csr", "edge_index"]


@dataclass(frozen=True)
class NodeTask:
    """One graph on one device, for full-batch node classification.

    Attributes:
        x: Features, [N, F] float32.
        adjacency: The model's second argument: the normalized adjacency with
            self-loops as sparse CSR [N, N] float32, or ``edge_index`` [2, E] int64.
        y: Classes [N] int64, or [N, C] float32 of 0 and 1 where ``multi_label``.
        train_idx, val_idx, test_idx: Node ids, int64.
        num_classes: Width of the model's output.
        multi_label: Whether a node may have several classes.
        part: The part of the graph, as :func:`gact_graph.distributed.partition` returns it, if
            several processes share the graph.
        learning: In that case, the number of training nodes of the whole graph.
    """

    x: Tensor
    adjacency: Tensor
    y: Tensor
    train_idx: Tensor
    val_idx: Tensor
    test_idx: Tensor
    num_classes: int
    multi_label: bool
    part: Data | None = None
    learning: int | None = None


def layout_of(model: str) -> Layout:
    """Return the layout for a model: edges for GAT, whose layers weigh them, else a matrix."""
    return "edge_index" if model == "gat" else "csr"


def prepare(
    graph: Graph, layout: Layout, *, standardize: bool = False, device: torch.device | str = "cpu"
) -> NodeTask:
    """Make the graph undirected, normalize it if the layout requires it, move it to a device.

    Args:
        graph: As :func:`datasets.load` returns it.
        layout: ``"csr"`` or ``"edge_index"``, see :class:`NodeTask`.
        standardize: Whether features get mean 0 and deviation 1, fitted on the training nodes.
        device: The device of the tensors.

    Raises:
        ExperimentError: If one of the three splits is empty.
    """
    sizes = [index.numel() for index in (graph.train_idx, graph.val_idx, graph.test_idx)]
    if 0 in sizes:
        raise ExperimentError(
            "Expected at least one training, validation and test node in data set "
            f"{graph.name!r} (got {sizes[0]}, {sizes[1]} and {sizes[2]})"
        )
    # On the device already: a GPU sorts some ten million edges quickly.
    edge_index = to_undirected(graph.edge_index.to(device), num_nodes=graph.num_nodes)
    adjacency = edge_index if layout == "edge_index" else normalized(edge_index, graph.num_nodes)
    x = _standardized(graph.x, graph.train_idx) if standardize else graph.x
    return NodeTask(
        x=x.to(device),
        adjacency=adjacency,
        y=graph.y.to(device),
        train_idx=graph.train_idx.to(device),
        val_idx=graph.val_idx.to(device),
        test_idx=graph.test_idx.to(device),
        num_classes=graph.num_classes,
        multi_label=graph.multi_label,
    )


def normalized(edge_index: Tensor, num_nodes: int) -> Tensor:
    """Return D^-1/2 (A + I) D^-1/2 as sparse CSR; the matrix is its own transpose."""
    edge_index, weight = gcn_norm(edge_index, None, num_nodes)
    # Checked once, here; without an explicit choice torch warns that it does not check.
    with torch.sparse.check_sparse_tensor_invariants(), warnings.catch_warnings():
        # torch warns that its CSR layout is a beta, which users of a command cannot change.
        warnings.filterwarnings("ignore", message="Sparse CSR tensor support is in beta")
        return to_torch_csr_tensor(edge_index, weight, size=(num_nodes, num_nodes))


def _standardized(x: Tensor, train_idx: Tensor) -> Tensor:
    known = x[train_idx]
    deviation = known.std(dim=0, correction=0)
    # A feature that is constant on the training nodes is only centred.
    return (x - known.mean(dim=0)) / torch.where(deviation > 0, deviation, 1.0)
