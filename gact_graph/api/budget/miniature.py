"""Smaller graphs with the proportions of a graph, to extrapolate memory to the whole graph.

A tensor of a training step has a row for each node, a row for each edge, or a fixed size. A graph
with a share of the nodes and edges shortens the first two by this share, so the memory of two such
graphs determines the memory of the whole graph.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor
from torch_geometric.data import Data, HeteroData
from torch_geometric.typing import SparseTensor

_ANY: Final = ("", "", "")
"""The key of edges without a type, between nodes of the type ``""``."""

_Key = str | tuple[str, str, str]


class CannotShrink(Exception):
    """The inputs cannot be made smaller, for the reason in the message."""


@dataclass(frozen=True)
class GraphSize:
    """The numbers of nodes and edges of all types."""

    nodes: int
    edges: int

    def joined(self, other: GraphSize) -> GraphSize:
        """Return the size of a graph that is as large as both."""
        return GraphSize(max(self.nodes, other.nodes), max(self.edges, other.edges))


class Miniature:
    """Resize the inputs of a model to a part of their graph.

    A part has the first nodes, repeated if it has more nodes than the graph, and edges at even
    distances in the list of edges. Their ends are scaled to the number of nodes, which preserves
    mean degrees and the order of edges: sorted edges need no sorted copy. Heterogeneous inputs may
    be dicts, with types of nodes and triples of types as keys, or ``HeteroData``.

    Args:
        args: The positional arguments of a call of the model.
        kwargs: The named arguments of the call.

    Attributes:
        size: The size of the graph in the inputs.

    Raises:
        CannotShrink: If the inputs contain no graph.
    """

    def __init__(self, args: Any, kwargs: Any) -> None:
        self._inputs = (args, kwargs)
        self._edges: dict[_Key, int] = {}
        self._nodes: dict[_Key, int] = {}
        self._types = {kind for key in _triples(self._inputs) for kind in (key[0], key[2])}
        self._features: set[int] = set()  # ids of sparse matrices
        tensors: list[tuple[_Key, Any]] = []

        def collect(tensor: Any, key: _Key) -> Any:
            tensors.append((key, tensor))
            return tensor

        self._map(self._inputs, "", collect)
        has_graph = any(_is_graph(tensor) for _, tensor in tensors)
        for key, tensor in tensors:
            if _is_sparse(tensor) and has_graph and not _is_graph(tensor) and isinstance(key, str):
                self._features.add(id(tensor))
            elif is_edges(tensor):
                self._count_edges(_ANY if isinstance(key, str) else key, tensor)
        if not self._edges:
            raise CannotShrink("no edge_index and no sparse matrix among the inputs")
        by_type: dict[str, list[Any]] = {}
        for key, tensor in tensors:
            if isinstance(key, str) and self._has_rows(tensor):
                by_type.setdefault(key, []).append(tensor)
        for kind, candidates in by_type.items():
            self._count_nodes(kind, candidates)
        self.size: Final = GraphSize(sum(self._nodes.values()), sum(self._edges.values()))

    def shrunk(self, nodes: float, edges: float) -> tuple[Any, Any]:
        """Return the inputs for a part of the graph.

        Args:
            nodes: The share of the nodes.
            edges: The share of the edges.
        """

        def resize(tensor: Any, key: _Key) -> Any:
            return _cut(self._resized(tensor, key, nodes, edges))

        result: tuple[Any, Any] = self._map(self._inputs, "", resize)
        return result

    def _has_rows(self, tensor: Any) -> bool:
        """Return whether a tensor may have a row for each node or edge."""
        return id(tensor) in self._features or (not is_edges(tensor) and tensor.dim() > 0)

    def _count_edges(self, key: tuple[str, str, str], edges: Any) -> None:
        self._edges[key] = max(self._edges.get(key, 0), _count(edges))
        for kind, least in zip((key[0], key[2]), _ends(edges), strict=True):
            self._nodes[kind] = max(self._nodes.get(kind, 0), least)

    def _count_nodes(self, kind: str, tensors: Sequence[Any]) -> None:
        # Without types, the number of rows distinguishes nodes from edges.
        least = self._nodes.get(kind, 0)
        edges = [*self._edges.values()] if kind == "" else []
        of_nodes = [t for t in tensors if t.size(0) >= least and t.size(0) not in edges]
        features = [t.size(0) for t in of_nodes if _is_sparse(t) or t.is_floating_point()]
        if features:
            self._nodes[kind] = max(features)
        elif of_nodes and (kind or _ANY in self._edges):
            # Features may be classes, such as atomic numbers; a list of indices may be longer.
            self._nodes[kind] = min(t.size(0) for t in of_nodes)

    def _under(self, name: Any, outer: _Key) -> _Key:
        """Return the type of a mapping's value: its name, if that is a type, or the outer type."""
        key: _Key = name if _is_triple(name) or name in self._types else outer
        return key

    def _map(self, value: Any, key: _Key, change: Callable[[Any, _Key], Any]) -> Any:
        if isinstance(value, (Tensor, SparseTensor)):
            return change(value, key)
        if isinstance(value, (Data, HeteroData)):
            changed = copy.copy(value)
            for store in changed.stores:
                for name, inside in [*store.items()]:
                    store[name] = self._map(inside, _key_of(store), change)
            return changed
        if isinstance(value, Mapping):
            return {
                name: self._map(inside, self._under(name, key), change)
                for name, inside in value.items()
            }
        if isinstance(value, (list, tuple)):
            items = [self._map(inside, key, change) for inside in value]
            return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
        return value

    def _resized(self, tensor: Any, key: _Key, nodes: float, edges: float) -> Any:
        if is_edges(tensor) and id(tensor) not in self._features:
            kinds = _ANY if isinstance(key, str) else key
            ends = [self._nodes[kind] for kind in (kinds[0], kinds[2])]
            return _fewer_edges(tensor, edges, ends, [_share(count, nodes) for count in ends])
        if not tensor.dim():
            return tensor
        length = tensor.size(0)
        if isinstance(key, str) and length == self._nodes.get(key):
            count = _share(length, nodes)
            if count <= length and not _is_sparse(tensor):
                return tensor.narrow(0, 0, count)  # a copy of wide features would be large
            return _rows(tensor, torch.arange(count, device=_device_of(tensor)) % max(1, length))
        counts = self._edges.values() if isinstance(key, str) else (self._edges.get(key),)
        if length in counts:
            return tensor.index_select(0, _spread(length, _share(length, edges), tensor.device))
        return tensor


def _cut(value: Any) -> Any:
    """Return the values as a leaf, which passes no gradient to the graph of the user."""
    needs_grad = value.requires_grad
    if not (needs_grad if isinstance(value, Tensor) else needs_grad()):
        return value
    return value.detach().requires_grad_()


def _is_sparse(value: Any) -> bool:
    return isinstance(value, SparseTensor) or value.layout != torch.strided


def _is_graph(value: Any) -> bool:
    """Return whether a value certainly has edges: an ``edge_index`` or a square matrix."""
    return is_edges(value) and (not _is_sparse(value) or value.size(0) == value.size(1))


def _device_of(value: Any) -> torch.device:
    device: torch.device = value.device() if isinstance(value, SparseTensor) else value.device
    return device


def _rows(tensor: Any, index: Tensor) -> Any:
    """Return rows of a tensor or a sparse matrix."""
    if isinstance(tensor, SparseTensor) or tensor.layout in (torch.strided, torch.sparse_coo):
        return tensor.index_select(0, index)
    return tensor.to_sparse_coo().index_select(0, index).to_sparse(layout=tensor.layout)


def is_edges(value: Any) -> bool:
    """Return whether a value is an ``edge_index`` [2, E] or a sparse matrix."""
    if _is_sparse(value):
        return True
    indices = not value.is_floating_point() and value.dtype != torch.bool
    return indices and value.dim() == 2 and value.size(0) == 2


def _triples(value: Any) -> Iterator[tuple[str, str, str]]:
    """Yield the types of edges in nested inputs."""
    if isinstance(value, HeteroData):
        yield from value.edge_types
    elif isinstance(value, Mapping):
        for name, inside in value.items():
            if _is_triple(name):
                yield name
            yield from _triples(inside)
    elif isinstance(value, (list, tuple)):
        for inside in value:
            yield from _triples(inside)


def _is_triple(name: Any) -> bool:
    return isinstance(name, tuple) and len(name) == 3


def _key_of(store: Any) -> _Key:
    key: _Key = getattr(store, "_key", None) or ""
    return key


def _count(edges: Any) -> int:
    if isinstance(edges, SparseTensor):
        return int(edges.nnz())
    if edges.layout == torch.strided:
        return int(edges.size(1))
    return int(edges._nnz())


def _ends(edges: Any) -> tuple[int, int]:
    """Return the least numbers of source and destination nodes that include all ends."""
    if isinstance(edges, SparseTensor) or edges.layout != torch.strided:
        return int(edges.size(1)), int(edges.size(0))
    if not edges.numel():
        return 0, 0
    source, destination = edges.amax(dim=1).tolist()
    return source + 1, destination + 1


def _share(count: int, share: float) -> int:
    return max(1, round(count * share)) if count else 0


def _spread(length: int, count: int, device: torch.device) -> Tensor:
    """Return ``count`` evenly spread indices below ``length``, repeated if there are fewer."""
    return torch.arange(count, device=device) * length // max(1, count)


def _fewer_edges(edges: Any, share: float, before: Sequence[int], after: Sequence[int]) -> Any:
    """Return a share of the edges or of a sparse matrix, between other numbers of nodes.

    Args:
        edges: The edges [2, E], or a matrix.
        share: The share of the edges.
        before: The numbers of source and destination nodes.
        after: The numbers of source and destination nodes in the result.
    """
    count, device = _count(edges), _device_of(edges)
    chosen = _spread(count, _share(count, share), device)
    old, new = (torch.tensor([[n] for n in numbers], device=device) for numbers in (before, after))
    if not _is_sparse(edges):
        return (edges.index_select(1, chosen).long() * new // old.clamp(min=1)).to(edges.dtype)
    indices, values = _entries(edges, chosen)
    row, col = indices * new.flip(0) // old.flip(0).clamp(min=1)
    size = after[1], after[0]
    if isinstance(edges, SparseTensor):
        return SparseTensor(row=row, col=col, value=values, sparse_sizes=size)
    small = torch.sparse_coo_tensor(
        torch.stack([row, col]), values, size, check_invariants=False, device=device
    ).coalesce()
    return small.to_sparse(layout=edges.layout)


def _entries(matrix: Any, chosen: Tensor) -> tuple[Tensor, Any]:
    """Return indices [2, K] and values [K] of entries, without a copy of the whole matrix."""
    if isinstance(matrix, SparseTensor):
        row, col, values = matrix.coo()
        indices = torch.stack([row[chosen], col[chosen]])
        return indices, None if values is None else values[chosen]
    if matrix.layout == torch.sparse_coo:
        return matrix._indices()[:, chosen], matrix._values()[chosen]
    by_row = matrix.layout == torch.sparse_csr
    starts = matrix.crow_indices() if by_row else matrix.ccol_indices()
    inner = (matrix.col_indices() if by_row else matrix.row_indices())[chosen]
    outer = torch.searchsorted(starts, chosen.to(starts.dtype), right=True) - 1
    pair = (outer, inner) if by_row else (inner, outer)
    return torch.stack([end.long() for end in pair]), matrix.values()[chosen]
