"""The edges of a graph in the order of their destinations, and in that of their sources."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cached_property

import torch
from torch import Tensor

from gact_graph.layers.blocks.cuts import Block, Cuts

_CHUNK, _CUDA_CHUNK = 1 << 17, 1 << 24
"""Edges that are read at a time: on the CPU as many as its cache holds, on CUDA enough for a
launch."""


class BySource:
    """The edges of an :class:`Order` once more, sorted by source: so gradients go back along them.

    Args:
        order: The order.

    Attributes:
        destinations: The destination of each edge [E], of the type of ``order.sources``.
        positions: The position in edge_index of each edge [E], of the same type.
        cuts: The edges of each of ``order.num_sources`` nodes.
    """

    def __init__(self, order: Order) -> None:
        sources, narrow = order.sources, order.sources.dtype
        counts = torch.bincount(sources, minlength=order.num_sources)
        self.cuts = Cuts(counts)
        nodes = torch.arange(order.num_destinations, dtype=narrow, device=sources.device)
        destinations = nodes.repeat_interleave(order.starts.diff(), output_size=order.num_edges)
        permutation = sources.argsort(stable=True).to(narrow)
        self.destinations = destinations.index_select(0, permutation)
        if order.permutation is not None:
            permutation = order.permutation.index_select(0, permutation)
        self.positions = permutation

    @property
    def nbytes(self) -> int:
        """Bytes that the order takes on the device of the edges."""
        return self.destinations.nbytes + self.positions.nbytes + self.cuts.starts.nbytes


class Order:
    """The edges of a graph, sorted by destination.

    Args:
        edge_index: Edges [2, E], int64.
        target: The row of edge_index that holds the destinations: 1 for ``source_to_target``.
        num_destinations: Number of destination nodes.

    Attributes:
        sources: The source of each edge [E], int32 where that is wide enough, else int64.
        cuts: The edges of each destination node.
        starts: For each destination node the first of its edges [num_destinations + 1], int64.
        permutation: The position in edge_index of each edge [E]; None if it is sorted already.
        num_sources: The least number of source nodes that these edges can have.

    Raises:
        IndexError: A node index is negative, or a destination is too large.
    """

    def __init__(self, edge_index: Tensor, target: int, num_destinations: int) -> None:
        self.target, self.num_destinations = target, num_destinations
        self.num_edges = edge_index.size(1)
        destinations = edge_index[target]
        low, high = (int(bound) for bound in edge_index.aminmax())
        last = int(destinations.max())
        if low < 0:
            raise IndexError(f"has the negative node index {low} in its edge_index")
        if last >= num_destinations:
            raise IndexError(
                f"has an edge to node {last}, but only {num_destinations} destination nodes"
            )
        narrow = torch.int32 if max(self.num_edges, high) < 2**31 else torch.int64
        self.cuts = Cuts(torch.bincount(destinations, minlength=num_destinations))
        self.starts = self.cuts.starts
        self.permutation: Tensor | None = None
        sources = edge_index[1 - target]
        if bool((destinations[1:] < destinations[:-1]).any()):
            permutation = destinations.argsort(stable=True)
            sources = sources[permutation]
            self.permutation = permutation.to(narrow)
        self.sources = sources.to(narrow)
        self.num_sources = int(sources.max()) + 1

    @property
    def nbytes(self) -> int:
        """Bytes that the order takes on the device of the edges."""
        own = 0 if self.permutation is None else self.permutation.nbytes
        by_source = self.by_source.nbytes if "by_source" in vars(self) else 0
        return own + by_source + self.sources.nbytes + self.starts.nbytes

    @cached_property
    def by_source(self) -> BySource:
        """The same edges, sorted by source."""
        return BySource(self)

    def destinations(self, block: Block) -> Tensor:
        """The destination of each edge of the block, counted from its first node: int64."""
        counts = self.starts[block.first_node : block.end_node + 1].diff()
        return torch.repeat_interleave(counts, output_size=block.num_edges)

    def positions(self, block: Block) -> Tensor | slice:
        """The positions of the block's edges in edge_index."""
        return block.edges if self.permutation is None else self.permutation[block.edges]

    def is_of(self, edge_index: Tensor, target: int, num_destinations: int) -> bool:
        """Whether the same order would be made of these edges; all of them are compared."""
        sizes = target, num_destinations, edge_index.size(1)
        if sizes != (self.target, self.num_destinations, self.num_edges):
            return False
        if edge_index.device != self.sources.device:
            return False
        if not _is_on_host(edge_index):
            return bool(self._is_same(edge_index))  # waits for the device, once
        counts = torch.bincount(edge_index[target], minlength=num_destinations)
        if counts.numel() > num_destinations:
            return False
        return all(bool(check) for check in self._checks(edge_index, counts))

    def _is_same(self, edge_index: Tensor) -> Tensor:
        """Whether these are the edges, found without a wait for the device, as bincount has one."""
        found, chunk = self.starts.new_ones((), dtype=torch.bool), chunk_of(edge_index)
        for edge in range(0, self.num_edges, chunk):
            got = self._chunk(edge_index, slice(edge, edge + chunk))
            edges = torch.arange(edge, edge + got.size(1), device=got.device)
            owners = torch.searchsorted(self.starts, edges, right=True) - 1
            found &= (got[1 - self.target] == self.sources[edge : edge + chunk]).all()
            found &= (got[self.target] == owners).all()
        return found

    def _chunk(self, edge_index: Tensor, part: slice) -> Tensor:
        """A part of these edges in this order."""
        if self.permutation is None:
            return edge_index[:, part]
        return edge_index.index_select(1, self.permutation[part])

    def _checks(self, edge_index: Tensor, counts: Tensor) -> Iterator[Tensor]:
        yield (counts == self.starts.diff()).all()
        # Given these numbers of edges, only the right destinations never descend.
        last = None
        chunk = chunk_of(edge_index)
        for edge in range(0, self.num_edges, chunk):
            part = slice(edge, edge + chunk)
            got = self._chunk(edge_index, part)
            sources, destinations = got[1 - self.target], got[self.target]
            yield (sources == self.sources[part]).all()
            yield (destinations[1:] >= destinations[:-1]).all()
            if last is not None:
                yield destinations[0] >= last
            last = destinations[-1]


def chunk_of(edge_index: Tensor) -> int:
    """Edges to read at a time."""
    return _CHUNK if _is_on_host(edge_index) else _CUDA_CHUNK


def _is_on_host(tensor: Tensor) -> bool:
    return tensor.device.type == "cpu"
