"""A graph cut into parts: each has some nodes with all edges to them."""

from __future__ import annotations

import importlib.util

import torch
from torch import Tensor
from torch_geometric.data import Data


def partition(data: Data, parts: int, owner: Tensor | None = None) -> list[Data]:
    """Cuts a graph into parts, one for each process.

    METIS cuts it where ``pymetis`` is installed, so that few edges lead from part to part, and that
    each has about as much work in its nodes and the edges to them. Otherwise nodes go to parts in
    the order in which they stand. Every process gets the same parts.

    Args:
        data: A graph with ``edge_index`` [2, E], whose tensors of nodes and of edges are cut too.
        parts: How many.
        owner: The part of each node [N], int64, in place of that choice.

    Returns:
        The parts. Each holds its rows of all tensors of nodes, and in ``edge_index`` the edges to
        its nodes: these count from 0, and sources in other parts come after them. Beside these:

        - ``nodes`` [n]: the numbers of its nodes in the whole graph, ascending;
        - ``halo`` [h]: those of the sources in other parts, ordered by part;
        - ``send`` [s]: its nodes, counted from 0, that other parts read, ordered by part;
        - ``send_counts``, ``halo_counts`` [parts]: how many for and from each part.

    Raises:
        TypeError: ``data`` is no ``Data``, such as one of several types of nodes, or it has no
            ``edge_index``, or one that is no tensor.
        ValueError: There are fewer nodes than parts, or ``owner`` leaves a part without nodes.
    """
    if not isinstance(data, Data):
        raise TypeError(
            f"Expected data with one type of nodes and of edges (got {type(data).__name__}), for "
            "layers on a part fetch rows of one type; data.to_homogeneous() makes one of several"
        )
    edge_index, num_nodes = data.edge_index, data.num_nodes
    if type(edge_index) is not Tensor or num_nodes is None:
        raise TypeError(
            "Expected data with an edge_index [2, E] as a tensor "
            f"(got {type(edge_index).__name__}); other forms of edges cannot be cut"
        )
    if not 1 <= parts <= num_nodes:
        raise ValueError(f"Expected 1 to {num_nodes} parts, one node each at least (got {parts})")
    if owner is None:
        owner = owners(edge_index, num_nodes, parts)
    elif len(owner) != num_nodes or owner.unique().tolist() != list(range(parts)):
        raise ValueError(
            f"Expected owner to name parts 0 to {parts - 1} for {num_nodes} nodes, each part at "
            f"least once (got {owner.unique().tolist()[:20]} for {len(owner)})"
        )
    place = torch.empty_like(owner)
    for part in range(parts):
        nodes = (owner == part).nonzero().view(-1)
        place[nodes] = torch.arange(len(nodes), device=owner.device)
    found = [_part(data, owner, place, part) for part in range(parts)]
    for part, one in enumerate(found):
        read = [other.halo[owner[other.halo] == part] for other in found]
        one.send = place[torch.cat(read)]
        one.send_counts = torch.tensor([len(rows) for rows in read], device="cpu")
        one.halo_counts = torch.bincount(owner[one.halo], minlength=parts).cpu()
    return found


def _part(data: Data, owner: Tensor, place: Tensor, part: int) -> Data:
    nodes = (owner == part).nonzero().view(-1)
    edges = (owner[data.edge_index[1]] == part).nonzero().view(-1)
    source, destination = data.edge_index[:, edges]
    halo = source[owner[source] != part].unique()
    halo = halo[owner[halo].argsort(stable=True)]
    place = place.clone()
    place[halo] = len(nodes) + torch.arange(len(halo), device=halo.device)
    found = Data(num_nodes=len(nodes))
    for key, value in data:
        if key != "edge_index" and data.is_node_attr(key):
            found[key] = value[nodes]
        elif key != "edge_index" and data.is_edge_attr(key):
            found[key] = value[edges]
    found.edge_index = torch.stack([place[source], place[destination]])
    found.nodes, found.halo = nodes, halo
    return found


def owners(edge_index: Tensor, num_nodes: int, parts: int) -> Tensor:
    """The part of each node [N], int64: by METIS where pymetis is, else in the order of nodes.

    Each part has some, if there are as many nodes as parts.
    """
    if parts == 1 or importlib.util.find_spec("pymetis") is None:
        return in_order(num_nodes, parts, edge_index.device)
    import pymetis

    both = torch.cat([edge_index, edge_index.flip(0)], dim=1).cpu()
    source, destination = both[:, both[0] != both[1]].unique(dim=1)
    starts = torch.zeros(num_nodes + 1, dtype=torch.int64, device="cpu")
    starts[1:] = torch.bincount(source, minlength=num_nodes).cumsum(0)
    adjacency = pymetis.CSRAdjacency(starts.numpy(), destination.numpy())
    # A node is as much work as its edges and, for what is done node by node, some more.
    degree = torch.bincount(edge_index[1].cpu(), minlength=num_nodes)
    work = degree + max(1, edge_index.size(1) // num_nodes)
    _, found = pymetis.part_graph(parts, adjacency, vweights=work.tolist())
    owner = torch.as_tensor(found, dtype=torch.int64, device=edge_index.device)
    # Of a small graph METIS may leave a part empty.
    if len(owner.unique()) == parts:
        return owner
    return in_order(num_nodes, parts, edge_index.device)


def in_order(num_nodes: int, parts: int, device: torch.device | str = "cpu") -> Tensor:
    """The part of each node [N], int64: of so many consecutive nodes each, one more or less."""
    return torch.arange(num_nodes, device=device) * parts // num_nodes


def check_edges(edge_index: object) -> None:
    """Raises TypeError unless these are pairs of numbers."""
    if type(edge_index) is not Tensor or edge_index.layout != torch.strided:
        raise TypeError(
            "Expected a part's edges as edge_index [2, E] (got "
            f"{type(edge_index).__name__}); pass part.edge_index"
        )
