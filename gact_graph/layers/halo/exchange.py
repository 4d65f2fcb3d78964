"""The rows of nodes that other processes have: fetched in forward, their gradients sent back."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch_geometric.data import Data

from gact_graph.ops.checks import TILE
from gact_graph.ops.quantize import DTYPES, Packed, pack

_GROUP = 256
"""Elements that share a minimum and a step where rows travel in few bits."""


class Exchange:
    """Fetches rows for one part.

    All processes call it for the same tensors in the same order. Where it travels in few bits, the
    rows for each process are quantized by themselves, with other noise at each call.

    Args:
        part: What :func:`gact_graph.layers.halo.parts.partition` gave for this process.
        bits: Of an element on its way; 32: as it is.
        seed: Of the noise.

    Attributes:
        sent_bytes: What this process has sent to others since the last forward began.
        tried: Names of layers that were found to be local.

    Raises:
        ValueError: The graph has another number of parts than there are processes.
    """

    def __init__(self, part: Data, bits: int, seed: int) -> None:
        self.num_nodes = int(part.num_nodes or 0)
        self.num_halo = len(part.halo)
        self.sent_bytes = 0
        self.tried: set[str] = set()
        self._tape: list[Tensor] | None = None
        self._lent: Iterator[Tensor] | None = None
        self._send = part.send
        self._send_counts = part.send_counts.tolist()
        self._halo_counts = part.halo_counts.tolist()
        self._bits, self._seed, self._calls = bits, seed, 0
        parts = self.num_parts
        world = dist.get_world_size() if dist.is_initialized() else 1
        if parts != world:
            raise ValueError(
                f"Expected one part for each of {world} processes (got one of {parts}); cut the "
                "graph with parts=torch.distributed.get_world_size(), after init_process_group"
            )

    @property
    def num_parts(self) -> int:
        """How many parts the graph has."""
        return len(self._send_counts)

    def next_step(self, *_: object) -> None:
        """Called when a forward starts."""
        self.sent_bytes = 0

    def extended(self, x: Tensor, exact: bool = False) -> Tensor:
        """``x`` [num_nodes, ...] and below it the rows of the halo.

        Args:
            x: A tensor of nodes.
            exact: Whether the rows travel as they are.

        Raises:
            ValueError: ``x`` has another number of rows.
        """
        if x.size(0) != self.num_nodes:
            raise ValueError(
                f"Expected a tensor with a row for each of the part's {self.num_nodes} nodes (got "
                f"{x.size(0)}); pass what part holds to the model"
            )
        if self._lent is not None:
            return torch.cat([x, next(self._lent)])
        found = x if self.num_parts == 1 else torch.cat([x, self._rows(x, exact)])
        if self._tape is not None:
            self._tape.append(found)
        return found

    def _rows(self, x: Tensor, exact: bool) -> Tensor:
        return _Fetch.apply(x, self, 32 if exact else self._bits)

    @contextmanager
    def taped(self) -> Iterator[list[Tensor]]:
        """Gives what :meth:`extended` returns inside. Nothing is counted as sent."""
        before = self._tape, self.sent_bytes
        self._tape = []
        try:
            yield self._tape
        finally:
            self._tape, self.sent_bytes = before

    @contextmanager
    def of_few(self, num_nodes: int, halo: Tensor, tape: list[Tensor]) -> Iterator[None]:
        """Inside, the part has so many nodes, and its halo's rows are those of taped tensors."""
        sizes = self.num_nodes, self.num_halo
        self.num_nodes, self.num_halo = num_nodes, len(halo)
        self._lent = (one[halo] for one in tape)
        try:
            yield
        finally:
            self.num_nodes, self.num_halo = sizes
            self._lent = None

    def fetch(self, x: Tensor, bits: int) -> Tensor:
        """The rows of the halo [num_halo, ...]."""
        rows = x.index_select(0, self._send)
        return self._trade(rows, self._send_counts, self._halo_counts, bits)

    def give_back(self, gradient: Tensor, bits: int) -> Tensor:
        """The gradient of a tensor whose rows were fetched, from that of the rows."""
        back = self._trade(gradient.contiguous(), self._halo_counts, self._send_counts, bits)
        found = back.new_zeros(self.num_nodes, *back.shape[1:])
        return found.index_add_(0, self._send, back)

    def _trade(self, rows: Tensor, give: list[int], take: list[int], bits: int) -> Tensor:
        """Sends rows to each process, ``give`` of them to each, and receives ``take`` of them."""
        own = dist.get_rank()
        if bits >= min(32, 8 * rows.element_size()) or rows.dtype not in DTYPES:
            found = rows.new_empty(sum(take), *rows.shape[1:])
            dist.all_to_all_single(found, rows, take, give)
            width = rows[:1].numel() * rows.element_size()
            self.sent_bytes += (sum(give) - give[own]) * width
            return found
        self._calls += 1
        sent = [
            _bytes_of(pack(one, self._bits, group_size=_GROUP, seed=self._noise(to)))
            for to, one in enumerate(rows.split(give))
        ]
        width = rows.shape[1:].numel()
        sizes = [sum(self._sizes(count * width)) for count in take]
        received = rows.new_empty(sum(sizes), dtype=torch.uint8)
        dist.all_to_all_single(received, torch.cat(sent), sizes, [len(one) for one in sent])
        self.sent_bytes += sum(len(one) for to, one in enumerate(sent) if to != own)
        parts = zip(received.split(sizes), take, strict=True)
        return torch.cat([self._rows_of(one, rows, count) for one, count in parts])

    def _rows_of(self, received: Tensor, like: Tensor, count: int) -> Tensor:
        shape = torch.Size([count, *like.shape[1:]])
        if count == 0:
            return like.new_empty(shape)
        codes, stats = (t.clone() for t in received.split(self._sizes(shape.numel())))
        return Packed(
            codes.view(torch.int64).view(-1, self._bits),
            stats.view(torch.bfloat16).view(-1, 2),
            shape,
            like.dtype,
            self._bits,
            _GROUP,
        ).unpack()

    def _sizes(self, numel: int) -> list[int]:
        """Bytes of the codes and of the statistics of so many elements."""
        return [-(-numel // TILE) * self._bits * 8, -(-numel // _GROUP) * 4]

    def _noise(self, to: int) -> int:
        world = dist.get_world_size()
        return hash((self._seed, self._calls, dist.get_rank() * world + to))


def _bytes_of(packed: Packed) -> Tensor:
    # A group with NaN or infinity has NaN for its statistics, and arrives as NaN.
    assert packed.stats is not None
    return torch.cat([t.contiguous().view(-1).view(torch.uint8) for t in packed.tensors[:2]])


class _Fetch(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, exchange: Exchange, bits: int) -> Tensor:
        ctx.exchange, ctx.bits = exchange, bits
        return exchange.fetch(x, bits)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        [gradient] = gradients
        return ctx.exchange.give_back(gradient, ctx.bits), None, None

    @staticmethod
    def local_backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        """Backward as if the rows were constants: without waiting for the other processes."""
        [gradient] = gradients
        return gradient.new_zeros(ctx.exchange.num_nodes, *gradient.shape[1:]), None, None
