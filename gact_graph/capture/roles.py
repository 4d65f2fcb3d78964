"""Whether a saved tensor belongs to nodes or to edges, told by its first dimension."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


class Sizes:
    """How many nodes and edges the message passing of one forward had."""

    def __init__(self) -> None:
        self._nodes: set[int] = set()
        self._edges: set[int] = set()

    def add(self, edge_index: Any, size: Any) -> None:
        """Notes one call of ``propagate``.

        Args:
            edge_index: Its edges in any format.
            size: The numbers of source and destination nodes; None where they are not known.
        """
        self._nodes |= {int(n) for n in size if n is not None}
        if not isinstance(edge_index, Tensor):
            self._edges.add(int(edge_index.nnz()))  # torch_sparse.SparseTensor
        elif edge_index.layout == torch.strided:
            self._edges.add(int(edge_index.size(1)))
        elif edge_index.layout == torch.sparse_coo:
            self._edges.add(int(edge_index._nnz()))
        else:
            self._edges.add(int(edge_index.values().size(0)))

    def role_of(self, shape: tuple[int, ...], of_edges: bool) -> str:
        """``node``, ``edge`` or ``other``.

        Args:
            shape: Of the tensor. On static graphs a batch dimension comes before the nodes.
            of_edges: Whether it was saved while messages were made. That decides where a graph has
                as many nodes as edges.
        """
        first, second = (self._edges, "edge"), (self._nodes, "node")
        if not of_edges:
            first, second = second, first
        for size in (*shape[:1], *shape[-2:-1]):
            for sizes, role in (first, second):
                if size in sizes:
                    return role
        return "other"
