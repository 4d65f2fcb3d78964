"""The edges of a graph in the order of their destinations, and in that of their sources."""

from __future__ import annotations

from functools import cached_property

import torch
from torch import Tensor

from gact_graph.layers.blocks.cuts import Block, Cuts


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
