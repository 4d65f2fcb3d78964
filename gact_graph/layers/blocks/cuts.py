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
        self._blocks: dict[int, list[Block]] = {}

    def blocks(self, size: int) -> list[Block]:
        """Return blocks of at most ``size`` edges and nodes together.

        A node with more edges than that has a block of its own.
        """
        if size not in self._blocks:
            cut, node = [], 0
            while node < self._num_nodes:
                weight = int(self._starts[node]) + node
                end = int(torch.searchsorted(self._weights, weight + size, right=True))
                end = max(end, node + 1)
                cut.append(self._block(node, end))
                node = end
            while len(self._blocks) >= _MOST:
                del self._blocks[next(iter(self._blocks))]
            self._blocks[size] = cut
        return self._blocks[size]

    def blocks_of_nodes(self, nodes: int) -> list[Block]:
        """Blocks of so many nodes, whatever edges they have; the last may have fewer."""
        firsts = range(0, self._num_nodes, nodes)
        return [self._block(node, min(node + nodes, self._num_nodes)) for node in firsts]

    def _block(self, node: int, end: int) -> Block:
        return Block(node, end, int(self._starts[node]), int(self._starts[end]))
