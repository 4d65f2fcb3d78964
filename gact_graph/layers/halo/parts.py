"""A graph cut into parts: each has some of the nodes, with all edges to them."""

from __future__ import annotations

import importlib.util

import torch
from torch import Tensor
from torch_geometric.data import Data
from torch_geometric.utils import remove_self_loops, to_undirected

from gact_graph.ops.quantize import check_int


def partition(data: Data, parts: int, owner: Tensor | None = None) -> list[Data]:
    """Cut a graph into parts, one for each process.

    If ``pymetis`` is installed, METIS chooses the parts such that few edges connect different
    parts, and that nodes and edges of each part are about the same work. Otherwise nodes keep their
    order. All processes compute the same parts.

    Args:
        data: A graph with ``edge_index`` [2, E]; its tensors with a row for each node or edge are
            cut, too, and other data is left out.
        parts: Number of parts.
        owner: The part of each node [N], int64, in place of METIS's choice.

    Returns:
        The parts. Each has the rows of its nodes and edges in all tensors, and in ``edge_index``
        the edges to its nodes, which are numbered from 0; sources in other parts are numbered after
        them. Further attributes:

        - ``nodes`` [n]: the numbers of its nodes in the whole graph, ascending;
        - ``halo`` [h]: the numbers of the sources in other parts, ordered by part;
        - ``send`` [s]: its nodes, numbered from 0, that other parts read, ordered by part;
        - ``send_counts``, ``halo_counts`` [parts]: the numbers of these for each part.

    Raises:
        TypeError: ``data`` is no ``Data`` with one type of nodes, or has no ``edge_index``, or one
            that is no tensor; ``parts`` is no int, or ``owner`` no tensor.
        ValueError: ``parts`` is not 1 to the number of nodes; or ``owner`` has another length,
            names other parts, or leaves a part without nodes.
    """
    if not isinstance(data, Data):
        raise TypeError(
            f"Expected data with one type of nodes and of edges (got {type(data).__name__}), since "
            "layers on a part fetch rows of one type; call data.to_homogeneous()"
        )
    edge_index, num_nodes = data.edge_index, data.num_nodes
    if type(edge_index) is not Tensor or num_nodes is None:
        raise TypeError(
            "Expected data with an edge_index [2, E] as a tensor "
            f"(got {type(edge_index).__name__}); other forms of edges cannot be cut"
        )
    check_int("parts", parts)
    if not 1 <= parts <= num_nodes:
        raise ValueError(f"Expected 1 to {num_nodes} parts with a node or more each (got {parts})")
    if owner is None:
        owner = owners(edge_index, num_nodes, parts)
    elif not isinstance(owner, Tensor):
        raise TypeError(f"Expected owner to be a tensor [N] (got {type(owner).__name__})")
    elif len(owner) != num_nodes or owner.unique().tolist() != list(range(parts)):
        raise ValueError(
            f"Expected owner to name parts 0 to {parts - 1} for {num_nodes} nodes, each part at "
            f"least once (got {owner.unique().tolist()[:20]} for {len(owner)})"
        )
    number = torch.empty_like(owner)  # of each node in its part
    for part in range(parts):
        nodes = (owner == part).nonzero().view(-1)
        number[nodes] = torch.arange(len(nodes), device=owner.device)
    cut = [_part(data, owner, number, part) for part in range(parts)]
    for i, part in enumerate(cut):
        read = [other.halo[owner[other.halo] == i] for other in cut]
        part.send = number[torch.cat(read)]
        part.send_counts = torch.tensor([len(rows) for rows in read], device="cpu")
        part.halo_counts = torch.bincount(owner[part.halo], minlength=parts).cpu()
    return cut


def _part(data: Data, owner: Tensor, number: Tensor, i: int) -> Data:
    nodes = (owner == i).nonzero().view(-1)
    edges = (owner[data.edge_index[1]] == i).nonzero().view(-1)
    edge_index = data.edge_index[:, edges]
    halo = edge_index[0][owner[edge_index[0]] != i].unique()
    halo = halo[owner[halo].argsort(stable=True)]
    number = number.clone()
    number[halo] = len(nodes) + torch.arange(len(halo), device=halo.device)
    part = Data(num_nodes=len(nodes), edge_index=number[edge_index], nodes=nodes, halo=halo)
    for key, value in data:
        if key == "edge_index" or isinstance(value, (list, tuple)):
            continue
        rows = nodes if data.is_node_attr(key) else edges if data.is_edge_attr(key) else None
        # Not edge_label_index [2, L], which PyG takes for a tensor of edges if L = E.
        if rows is not None and (data.__cat_dim__(key, value) == 0 or value.ndim == 1):
            part[key] = value[rows]
    return part


def owners(edge_index: Tensor, num_nodes: int, parts: int) -> Tensor:
    """Return the part of each node [N], int64: by METIS with pymetis, else in the order of nodes.

    No part is empty if there are as many nodes as parts.
    """
    if parts == 1 or importlib.util.find_spec("pymetis") is None:
        return in_order(num_nodes, parts, edge_index.device)
    import pymetis

    edges = edge_index.cpu()
    source, destination = to_undirected(remove_self_loops(edges)[0], num_nodes=num_nodes)
    starts = torch.searchsorted(source, torch.arange(num_nodes + 1, device="cpu"))
    adjacency = pymetis.CSRAdjacency(starts.numpy(), destination.numpy())
    # The work of a node is its edges, and some more for operations on nodes.
    work = torch.bincount(edges[1], minlength=num_nodes) + max(1, edges.size(1) // num_nodes)
    _, chosen = pymetis.part_graph(parts, adjacency, vweights=work.tolist())
    owner = torch.as_tensor(chosen, dtype=torch.int64, device=edge_index.device)
    if len(owner.unique()) < parts:  # METIS may leave a part of a small graph empty
        return in_order(num_nodes, parts, edge_index.device)
    return owner


def in_order(num_nodes: int, parts: int, device: torch.device) -> Tensor:
    """Return the part of each node [N], int64, for parts of consecutive nodes."""
    return torch.arange(num_nodes, device=device) * parts // num_nodes


def check_edges(edge_index: object) -> None:
    """Raise TypeError unless the edges are a dense tensor."""
    if type(edge_index) is not Tensor or edge_index.layout != torch.strided:
        raise TypeError(
            "Expected the edges of a part as edge_index [2, E] (got "
            f"{type(edge_index).__name__}); pass part.edge_index"
        )
