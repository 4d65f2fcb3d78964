"""Rows of nodes in other parts: fetched in forward, with their gradients sent back in backward."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch_geometric.data import Data

from gact_graph.ops.checks import TILE
from gact_graph.ops.quantize import DTYPES, Packed, pack
from gact_graph.support.collective import collective

_GROUP = 256
"""Elements per group of the quantizer."""


class Exchange:
    """Fetches the rows of one part's halo.

    All processes call it for the same tensors in the same order. Quantized rows are packed
    separately for each process, with new noise in each call.

    Args:
        part: The part of this process; see :func:`gact_graph.layers.halo.parts.partition`.
        bits: Bits per element for the transfer; 32 transfers the elements unchanged.
        seed: Seed of the noise.

    Attributes:
        sent_bytes: Bytes sent in the last forward and its backward, without those of the locality
            check.
        local_layers: Names of the layers that passed the locality check.

    Raises:
        ValueError: The number of parts differs from the number of processes.
    """

    def __init__(self, part: Data, bits: int, seed: int) -> None:
        self.num_nodes: int = int(part.num_nodes or 0)
        self.num_halo: int = len(part.halo)
        self.num_parts: int = len(part.send_counts)
        self.sent_bytes: int = 0
        self.local_layers: set[str] = set()
        self._send = part.send
        self._send_counts = part.send_counts.tolist()
        self._halo_counts = part.halo_counts.tolist()
        self._bits, self._seed, self._calls = bits, seed, 0
        self._record: list[Tensor] | None = None
        self._replay: Iterator[Tensor] | None = None
        world = dist.get_world_size() if dist.is_initialized() else 1
        if self.num_parts != world:
            raise ValueError(
                f"Expected one part for each of {world} processes (got one of {self.num_parts}); "
                "cut the graph with parts=torch.distributed.get_world_size(), after "
                "init_process_group"
            )

    def start_forward(self, *_: object) -> None:
        """Reset the count of sent bytes; a hook before the model's forward."""
        self.sent_bytes = 0

    def extend(self, x: Tensor, exact: bool = False) -> Tensor:
        """Append the rows of the halo.

        Args:
            x: A tensor [num_nodes, ...] of this part's nodes.
            exact: Whether to transfer the rows unchanged.

        Returns:
            A tensor [num_nodes + num_halo, ...].

        Raises:
            ValueError: ``x`` has another number of rows.
        """
        if x.size(0) != self.num_nodes:
            raise ValueError(
                f"Expected a tensor with a row for each of the part's {self.num_nodes} nodes (got "
                f"{x.size(0)}); pass tensors of the part to the model"
            )
        if self._replay is not None:
            return torch.cat([x, next(self._replay)])
        if self.num_parts > 1:
            x = torch.cat([x, _Fetch.apply(x, self, 32 if exact else self._bits)])
        if self._record is not None:
            self._record.append(x)
        return x

    @contextmanager
    def recording(self) -> Iterator[list[Tensor]]:
        """Record the results of :meth:`extend`, and count no bytes as sent."""
        before = self._record, self.sent_bytes
        self._record = []
        try:
            yield self._record
        finally:
            self._record, self.sent_bytes = before

    @contextmanager
    def replaying(self, num_nodes: int, halo: Tensor, record: list[Tensor]) -> Iterator[None]:
        """Restrict the part to some of its nodes, with halo rows from a record.

        Args:
            num_nodes: Number of these nodes.
            halo: Numbers of the other sources in the part with its halo.
            record: The results of :meth:`extend` on the whole part.
        """
        sizes = self.num_nodes, self.num_halo
        self.num_nodes, self.num_halo = num_nodes, len(halo)
        self._replay = (rows[halo] for rows in record)
        try:
            yield
        finally:
            self.num_nodes, self.num_halo = sizes
            self._replay = None

    def fetch(self, x: Tensor, bits: int) -> Tensor:
        """Return the rows of the halo [num_halo, ...]."""
        rows = x.index_select(0, self._send)
        return self._trade(rows, self._send_counts, self._halo_counts, bits)

    def give_back(self, gradient: Tensor, bits: int) -> Tensor:
        """Return the gradient of this part's rows from the gradients of all fetched rows."""
        received = self._trade(gradient.contiguous(), self._halo_counts, self._send_counts, bits)
        result = received.new_zeros(self.num_nodes, *received.shape[1:])
        return result.index_add_(0, self._send, received)

    def _trade(self, rows: Tensor, give: list[int], take: list[int], bits: int) -> Tensor:
        """Send ``give[i]`` rows to process i, and receive ``take[i]`` rows from it."""
        rank = dist.get_rank()
        if bits >= min(32, 8 * rows.element_size()) or rows.dtype not in DTYPES:
            received = rows.new_empty(sum(take), *rows.shape[1:])
            with collective("exchange rows of the halo"):
                dist.all_to_all_single(received, rows, take, give)
            width = rows[:1].numel() * rows.element_size()
            self.sent_bytes += (sum(give) - give[rank]) * width
            return received
        self._calls += 1
        seeds = (hash((self._seed, self._calls, rank * len(give) + to)) for to in range(len(give)))
        packed = [
            _pack(part, bits, seed) for part, seed in zip(rows.split(give), seeds, strict=True)
        ]
        shapes = [torch.Size([count, *rows.shape[1:]]) for count in take]
        sizes = [sum(_sizes(shape.numel(), bits)) for shape in shapes]
        received, sent = rows.new_empty(sum(sizes), dtype=torch.uint8), torch.cat(packed)
        with collective("exchange rows of the halo"):
            dist.all_to_all_single(received, sent, sizes, [*map(len, packed)])
        self.sent_bytes += sum(map(len, packed)) - len(packed[rank])
        parts = zip(received.split(sizes), shapes, strict=True)
        return torch.cat([_unpack(part, shape, rows.dtype, bits) for part, shape in parts])


def _pack(rows: Tensor, bits: int, seed: int) -> Tensor:
    """Return the quantized rows as bytes. A group with NaN or infinity arrives as NaN."""
    packed = pack(rows, bits, group_size=_GROUP, seed=seed)
    return torch.cat([t.contiguous().view(-1).view(torch.uint8) for t in packed.tensors[:2]])


def _unpack(received: Tensor, shape: torch.Size, dtype: torch.dtype, bits: int) -> Tensor:
    if shape[0] == 0:
        return received.new_empty(shape, dtype=dtype)
    codes, stats = (t.clone() for t in received.split(_sizes(shape.numel(), bits)))
    codes, stats = codes.view(torch.int64).view(-1, bits), stats.view(torch.bfloat16).view(-1, 2)
    return Packed(codes, stats, shape, dtype, bits, _GROUP).unpack()


def _sizes(numel: int, bits: int) -> list[int]:
    """Return the bytes of the codes and of the statistics."""
    return [-(-numel // TILE) * bits * 8, -(-numel // _GROUP) * 4]


class _Fetch(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, exchange: Exchange, bits: int) -> Tensor:
        ctx.exchange, ctx.bits = exchange, bits
        return exchange.fetch(x, bits)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        [gradient] = gradients
        return ctx.exchange.give_back(gradient, ctx.bits), None, None

    @staticmethod
    def local_backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        """Backward without the other processes: the fetched rows count as constants."""
        [gradient] = gradients
        return gradient.new_zeros(ctx.exchange.num_nodes, *gradient.shape[1:]), None, None
