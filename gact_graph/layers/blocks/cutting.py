"""The sorted edges, the kept sums and the size of blocks that the calls of a model share."""

from __future__ import annotations

import torch
from torch import Tensor

from gact_graph.layers.blocks.constant_sums import KeptSums
from gact_graph.layers.blocks.order import Order, Orders
from gact_graph.support.current import capture_disabled
from gact_graph.support.part import in_proportion

_CPU_BYTES = 12 << 20
"""Messages of a block on a CPU: the tensors of a block stay in the cache."""

_CPU_BYTES_QUANTIZED = 6 << 20
"""Messages of a block on a CPU where saved tensors are quantized, so that the memory of a block is
a larger share; slightly slower."""

_CUDA_SHARE, _CUDA_BYTES = 1 / 256, 256 << 20
"""Messages of a block on CUDA: the lesser of a share of the device's memory and a number of bytes.
With gradients a block takes several times that."""

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
        keep_sums: Whether sums of constant rows are kept from one forward to the next.

    Attributes:
        sums: The cache of these sums.
    """

    def __init__(
        self, orders: Orders, size: int | str, quantized: bool, keep_sums: bool = False
    ) -> None:
        self.orders: Orders = orders
        self.size = size
        self.quantized = quantized
        self.sums: KeptSums = KeptSums(keep_sums)

    def next_forward(self) -> None:
        """Count a forward, and drop orders and sums that have not been used lately."""
        self.orders.next_forward()
        self.sums.next_forward()

    def forget(self) -> None:
        """Drop all orders and sums."""
        self.orders, self.sums = Orders(), KeptSums(self.sums.is_active)

    @property
    def _confirms(self) -> bool:
        """Whether a known edge_index may have changed since its order was cached."""
        return False

    def order(
        self, edge_index: Tensor, target: int, num_destinations: int, num_sources: int
    ) -> Order:
        """Return the order of edges; see :meth:`Orders.get`.

        Raises:
            IndexError: An edge has no such source or destination.
        """
        with capture_disabled():  # else the index that sorts the edges would count as saved
            order = self.orders.get(edge_index, target, num_destinations, self._confirms)
        if order.num_sources > num_sources:
            raise IndexError(
                f"has an edge from node {order.num_sources - 1}, but only {num_sources} source "
                "nodes"
            )
        return order

    def edges_per_block(self, row_bytes: float, device: torch.device) -> int:
        """Return the number of edges of a block.

        Args:
            row_bytes: The bytes of the widest row that an edge has.
            device: The device of the edges.
        """
        if isinstance(self.size, int):
            return self.size
        if device.type == "cuda":
            memory = torch.cuda.get_device_properties(device).total_memory
            nbytes = min(memory * _CUDA_SHARE, float(_CUDA_BYTES))
            most = _CUDA_EDGES
        else:
            nbytes = float(_CPU_BYTES_QUANTIZED if self.quantized else _CPU_BYTES)
            most = _CPU_EDGES
        edges = min(max(LEAST_EDGES, int(nbytes / max(1.0, row_bytes))), most)
        return in_proportion(edges)
