"""How the edges of a call are sorted and cut into blocks."""

from __future__ import annotations

import torch
from torch import Tensor

from gact_graph.layers.blocks.arguments import Arguments
from gact_graph.layers.blocks.order import Order, Orders
from gact_graph.support.current import capture_disabled

_CPU_BYTES = 12 << 20
"""Messages of a block on a CPU: the tensors of a block stay in the cache."""

_CPU_BYTES_QUANTIZED = 6 << 20
"""Messages of a block on a CPU where saved tensors are quantized, so that the memory of a block is
a larger share; slightly slower."""

_CUDA_SHARE = 1 / 256
"""Messages of a block on CUDA, as a share of the device's memory; with gradients a block takes
several times that."""

LEAST_EDGES = 4096
"""With fewer edges, the overhead of a block shows."""

_CPU_EDGES, _CUDA_EDGES = 1 << 15, 1 << 24
"""With more edges, narrow messages gain nothing, and index tensors begin to count."""


class Cutting:
    """Sorts the edges of calls and chooses the size of blocks.

    Args:
        orders: The cache of orders.
        size: Edges of a block, or ``"auto"``.
        quantized: Whether saved tensors are quantized.

    Attributes:
        share: The factor of the edges of a block if ``size`` is ``"auto"``: a small part of a graph
            is cut into as many blocks as the whole, to measure how memory grows.
    """

    def __init__(self, orders: Orders, size: int | str, quantized: bool) -> None:
        self.orders, self.size, self.quantized = orders, size, quantized
        self.share = 1.0

    @property
    def _confirms(self) -> bool:
        """Whether a known edge_index may have changed since its order was cached."""
        return False

    def order(self, edge_index: Tensor, target: int, num_destinations: int) -> Order:
        """Return the order of edges; see :meth:`Orders.get`."""
        with capture_disabled():  # else the index that sorts the edges would count as saved
            return self.orders.get(edge_index, target, num_destinations, self._confirms)

    def edges_per_block(self, arguments: Arguments, summed: int | None) -> int:
        """Return the number of edges of a block, by the bytes of a message.

        Args:
            arguments: The arguments of a call.
            summed: Index of a tensor whose rows an operator sums, so that no edge has a row; None
                for no such tensor.
        """
        if isinstance(self.size, int):
            return self.size
        by_edge = {
            use.index for use in arguments.uses if use.level in ("source", "destination", "edge")
        }
        tensors = [arguments.tensors[index] for index in by_edge] or [*arguments.tensors]
        width = max(t.nbytes / max(1, t.size(0)) for t in tensors)
        if summed is not None and by_edge == {summed} and arguments.levels_of(summed) == {"source"}:
            width = 1.0  # an edge has nothing else
        device = tensors[0].device
        if device.type == "cuda":
            nbytes = torch.cuda.get_device_properties(device).total_memory * _CUDA_SHARE
            most = _CUDA_EDGES
        else:
            nbytes = float(_CPU_BYTES_QUANTIZED if self.quantized else _CPU_BYTES)
            most = _CPU_EDGES
        edges = min(max(LEAST_EDGES, int(nbytes / max(1.0, width))), most)
        return max(1, round(edges * self.share))
