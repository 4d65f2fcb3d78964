"""Arcs in the order of their destinations, cut into blocks; and the orders in use."""

from __future__ import annotations

import time
from collections.abc import Hashable
from dataclasses import dataclass

import torch
from torch import Tensor

from gact_graph.storage import key_of, version_of

_CHUNK = 1 << 17
"""Arcs that are compared at a time."""

_RESTS = 2
"""Forwards after which an order that none of them took is dropped: training and evaluation may
take turns."""


@dataclass(frozen=True)
class Block:
    """Rows (destination nodes) and their arcs, both as half-open ranges."""

    row: int
    row_end: int
    arc: int
    arc_end: int


class Order:
    """The arcs of a graph, sorted by destination.

    Args:
        edge_index: Arcs [2, E], int64.
        target: Which of its rows holds the destinations.
        rows: Number of destination nodes.

    Raises:
        IndexError: A destination is not one of them, or a source is negative.
    """

    def __init__(self, edge_index: Tensor, target: int, rows: int) -> None:
        self.target, self.rows, self.arcs = target, rows, edge_index.size(1)
        destinations = edge_index[target]
        low, high = (int(bound) for bound in edge_index.aminmax())
        if low < 0 or int(destinations.max()) >= rows:
            raise IndexError(f"has an arc to none of {rows} nodes")
        narrow = torch.int32 if max(self.arcs, high) < 2**31 else torch.int64
        counts = torch.bincount(destinations, minlength=rows)
        self.starts = torch.zeros(rows + 1, dtype=torch.int64, device=edge_index.device)
        torch.cumsum(counts, 0, out=self.starts[1:])
        self._ends = (self.starts[1:] + torch.arange(1, rows + 1, device=counts.device)).cpu()
        self._starts = self.starts.cpu()
        self.permutation: Tensor | None = None
        """Places of the sorted arcs in edge_index [E]; None if they are sorted there."""
        sources = edge_index[1 - target]
        if bool((destinations[1:] < destinations[:-1]).any()):
            permutation = destinations.argsort(stable=True)
            sources = sources[permutation]
            self.permutation = permutation.to(narrow)
        self.sources = sources.to(narrow)
        self.columns = int(sources.max()) + 1
        """The least number of source nodes that these arcs can have."""
        self._blocks: dict[int, list[Block]] = {}

    @property
    def nbytes(self) -> int:
        own = 0 if self.permutation is None else self.permutation.nbytes
        return own + self.sources.nbytes + self.starts.nbytes

    def blocks(self, size: int) -> list[Block]:
        """Blocks of at most ``size`` arcs and rows together, but of one row at least."""
        if size not in self._blocks:
            found, row = [], 0
            while row < self.rows:
                begun = int(self._starts[row]) + row
                end = int(torch.searchsorted(self._ends, begun + size, right=True))
                end = max(end, row + 1)
                found.append(Block(row, end, int(self._starts[row]), int(self._starts[end])))
                row = end
            self._blocks = {size: found}
        return self._blocks[size]

    def local(self, block: Block) -> Tensor:
        """The destination of each arc of the block, counted from its first row: int64."""
        counts = self.starts[block.row : block.row_end + 1].diff()
        return torch.repeat_interleave(counts, output_size=block.arc_end - block.arc)

    def places(self, block: Block) -> Tensor | slice:
        """Where the arcs of the block stand in edge_index."""
        found = slice(block.arc, block.arc_end)
        return found if self.permutation is None else self.permutation[found]

    def is_of(self, edge_index: Tensor, target: int, rows: int) -> bool:
        """Whether the same order would be made of these arcs: compared to the last one."""
        if (target, rows, self.arcs) != (self.target, self.rows, edge_index.size(1)):
            return False
        if edge_index.device != self.sources.device:
            return False
        counts = torch.bincount(edge_index[target], minlength=rows)
        if counts.numel() > rows or not torch.equal(counts, self.starts.diff()):
            return False
        # Of the same number of arcs for each destination, in one order only they do not descend.
        last = None
        for arc in range(0, self.arcs, _CHUNK):
            part = slice(arc, arc + _CHUNK)
            if self.permutation is None:
                got = edge_index[:, part]
            else:
                got = edge_index.index_select(1, self.permutation[part])
            sources, destinations = got[1 - target], got[target]
            if not torch.equal(sources, self.sources[part].to(sources.dtype)):
                return False
            if bool((destinations[1:] < destinations[:-1]).any()):
                return False
            if last is not None and bool(destinations[0] < last):
                return False
            last = destinations[-1]
        return True


class Orders:
    """The orders that the last forwards took.

    A layer may make a new edge_index at each forward that equals those before (GATConv adds
    self-loops); so where a tensor is not known by identity, its content is compared.
    """

    def __init__(self) -> None:
        self.seconds = 0.0
        """Spent on sorting and comparing so far."""
        self._forward = 0
        self._known: dict[Hashable, tuple[Order, int]] = {}

    def next_forward(self) -> None:
        """Counts a forward, and drops what was not taken lately."""
        self._forward += 1
        since = self._forward - _RESTS
        self._known = {k: v for k, v in self._known.items() if v[1] >= since}

    @property
    def nbytes(self) -> int:
        return sum(order.nbytes for order in {id(o): o for o, _ in self._known.values()}.values())

    def get(self, edge_index: Tensor, target: int, rows: int) -> Order:
        """The order of these arcs.

        Raises:
            IndexError: A destination is not one of ``rows``.
        """
        identity = (
            *(key_of(edge_index), version_of(edge_index), edge_index.storage_offset()),
            *(edge_index.shape, edge_index.stride(), target, rows),
        )
        known = self._known.get(identity)
        start = time.perf_counter()
        order = known[0] if known is not None else self._equal(edge_index, target, rows)
        if order is None:
            order = Order(edge_index, target, rows)
        self._known[identity] = order, self._forward
        self.seconds += time.perf_counter() - start
        return order

    def _equal(self, edge_index: Tensor, target: int, rows: int) -> Order | None:
        for order in {id(o): o for o, _ in self._known.values()}.values():
            if order.is_of(edge_index, target, rows):
                return order
        return None

    def __getstate__(self) -> dict[str, object]:
        return {"seconds": 0.0, "_forward": 0, "_known": {}}
