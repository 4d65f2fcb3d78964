"""Nodes that each have consecutive edges, cut into blocks."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

_MOST = 16
"""The most ways of cutting that are remembered: layers of other widths take other sizes."""


@dataclass(frozen=True)
class Block:
    """Consecutive nodes, and the edges of them: in the order of destinations, those to them.

    Both ranges are half-open: ``end_node`` and ``end_edge`` are the first ones of the next block.
    """

    first_node: int
    end_node: int
    first_edge: int
    end_edge: int

    @property
    def nodes(self) -> slice:
        return slice(self.first_node, self.end_node)

    @property
    def edges(self) -> slice:
        return slice(self.first_edge, self.end_edge)

    @property
    def num_nodes(self) -> int:
        return self.end_node - self.first_node

    @property
    def num_edges(self) -> int:
        return self.end_edge - self.first_edge


def starts_of(starts: Tensor, block: Block) -> Tensor:
    """What a block has of the first edges of nodes [N + 1]: its own, and where they end."""
    return starts[block.first_node : block.end_node + 1]


class Cuts:
    """Nodes that each have consecutive edges, and ways to cut them into blocks.

    Args:
        counts: The number of edges of each node [N].

    Attributes:
        starts: For each node the first of its edges [N + 1], int64.
    """

    def __init__(self, counts: Tensor) -> None:
        self._num_nodes = len(counts)
        self.starts = torch.zeros(self._num_nodes + 1, dtype=torch.int64, device=counts.device)
        torch.cumsum(counts, 0, out=self.starts[1:])
        self._starts = self.starts.cpu()
        # A node weighs as much as an edge, so that many without edges fill a block too.
        self._weights = self._starts[1:] + torch.arange(1, self._num_nodes + 1, device="cpu")
        self._blocks: dict[tuple[int, bool], list[Block]] = {}

    def blocks(self, size: int, edgeless: bool = True) -> list[Block]:
        """Blocks of at most ``size`` edges and nodes together.

        A node with more edges than that has a block of its own.

        Args:
            size: The most edges and nodes of a block.
            edgeless: Whether a block may begin with a node without edges, or have no edges at all.
                If not, each block has edges, each but the first begins with a node that has some,
                and nodes without edges do not count for the size.
        """
        if (size, edgeless) not in self._blocks:
            found, node = [], 0
            while node < self._num_nodes:
                weight = int(self._starts[node]) + node
                end = int(torch.searchsorted(self._weights, weight + size, right=True))
                end = max(end, node + 1)
                if not edgeless:
                    if self._starts[end] == self._starts[node]:
                        end = self._next_with_edges(end) + 1
                    end = self._next_with_edges(end)
                found.append(self._block(node, end))
                node = end
            while len(self._blocks) >= _MOST:
                del self._blocks[next(iter(self._blocks))]
            self._blocks[size, edgeless] = found
        return self._blocks[size, edgeless]

    def blocks_of_nodes(self, nodes: int) -> list[Block]:
        """Blocks of so many nodes, whatever edges they have; the last may have fewer."""
        firsts = range(0, self._num_nodes, nodes)
        return [self._block(node, min(node + nodes, self._num_nodes)) for node in firsts]

    def _block(self, node: int, end: int) -> Block:
        return Block(node, end, int(self._starts[node]), int(self._starts[end]))

    def _next_with_edges(self, node: int) -> int:
        """The first node from this one on that has edges; the number of nodes if none has."""
        if node >= self._num_nodes:
            return self._num_nodes
        return int(torch.searchsorted(self._starts[1:], self._starts[node], right=True))
