"""The orders of edges that are in use, found again by the content of an edge_index."""

from __future__ import annotations

import time
from collections.abc import Hashable
from dataclasses import dataclass

from torch import Tensor

from gact_graph.layers.blocks.order import Order
from gact_graph.support.content import checksum
from gact_graph.support.storage import key_of, version_of

_RESTS = 2
"""Forwards after which an unused order is dropped: training and evaluation may take turns."""


@dataclass
class _Entry:
    order: Order
    checksum: int
    forward: int  # the last one that used it


class Orders:
    """The orders of edges that the last forwards used, so that edges are sorted once.

    A layer may make a new edge_index in each forward that equals the one before (GATConv adds
    self-loops), so a new tensor is compared by its checksum. The memory of a known tensor may
    change unseen by autograd (through NumPy or ``.data``), so a known tensor is trusted only within
    one forward; the next one compares its checksum as well.

    Attributes:
        seconds: Time spent on sorting and comparing so far.
    """

    def __init__(self) -> None:
        self.seconds = 0.0
        self._forward = 0
        self._known: dict[Hashable, _Entry] = {}

    def next_forward(self) -> None:
        """Counts a forward, and drops orders that were not used lately."""
        self._forward += 1
        since = self._forward - _RESTS
        # A copy, here and below, because another thread may add one meanwhile.
        self._known = {k: v for k, v in [*self._known.items()] if v.forward >= since}

    @property
    def nbytes(self) -> int:
        """Bytes that all orders take."""
        return sum(order.nbytes for order in self._orders())

    def get(
        self, edge_index: Tensor, target: int, num_destinations: int, confirm: bool = False
    ) -> Order:
        """The order of these edges.

        Args:
            edge_index: [2, E], int64.
            target: The row of edge_index that holds the destinations.
            num_destinations: Number of destination nodes.
            confirm: Whether its content may have changed within this forward.

        Raises:
            IndexError: A node index is negative, or a destination is too large.
        """
        identity = (
            *(key_of(edge_index), version_of(edge_index), edge_index.storage_offset()),
            *(edge_index.shape, edge_index.stride(), target, num_destinations),
        )
        start = time.perf_counter()
        entry = self._known.get(identity)
        if entry is None or confirm or entry.forward != self._forward:
            found = int(checksum(edge_index))
            if entry is None or entry.checksum != found:
                order = self._equal(edge_index, target, num_destinations, found)
                order = order or Order(edge_index, target, num_destinations)
                entry = _Entry(order, found, self._forward)
            entry.forward = self._forward
            self._known[identity] = entry
        self.seconds += time.perf_counter() - start
        return entry.order

    def _equal(
        self, edge_index: Tensor, target: int, num_destinations: int, checksum: int
    ) -> Order | None:
        sizes = target, num_destinations, edge_index.size(1), edge_index.device
        for entry in [*self._known.values()]:
            order = entry.order
            own = order.target, order.num_destinations, order.num_edges, order.sources.device
            if entry.checksum == checksum and own == sizes:
                return order
        return None

    def _orders(self) -> list[Order]:
        return [*{id(entry.order): entry.order for entry in [*self._known.values()]}.values()]

    def __getstate__(self) -> dict[str, object]:
        return {"seconds": 0.0, "_forward": 0, "_known": {}}
