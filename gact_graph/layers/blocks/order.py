"""The edges of a graph sorted by destination and by source, and cut into blocks of nodes."""

from __future__ import annotations

import time
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from gact_graph.layers.blocks.recent import Recent
from gact_graph.support.content import checksum
from gact_graph.support.storage import key_of, version_of

_CACHED_SIZES = 16
"""Block sizes for which blocks are cached: layers of other widths use other sizes."""


@dataclass(frozen=True)
class Block:
    """Consecutive nodes with all their edges, as half-open ranges of the sorted edges."""

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


class SortedEdges:
    """Edges sorted by the node at one end.

    Args:
        counts: The number of edges of each node [N].
        neighbors: The node at the other end of each edge [E].
        permutation: The position in edge_index of each edge [E]; None if edge_index is sorted.

    Attributes:
        starts: The first edge of each node [N + 1], int64.
        num_nodes: N.
        num_edges: E.
    """

    def __init__(self, counts: Tensor, neighbors: Tensor, permutation: Tensor | None) -> None:
        self.neighbors = neighbors
        self.permutation = permutation
        self.num_nodes: int = len(counts)
        self.num_edges: int = len(neighbors)
        self.starts: Tensor = torch.zeros(
            self.num_nodes + 1, dtype=torch.int64, device=counts.device
        )
        torch.cumsum(counts, 0, out=self.starts[1:])
        self._starts = self.starts.cpu()
        # A node weighs as much as an edge, so that many nodes without edges fill a block too.
        self._weights = self._starts[1:] + torch.arange(1, self.num_nodes + 1, device="cpu")
        self._blocks: dict[int, list[Block]] = {}

    @property
    def nbytes(self) -> int:
        """Bytes on the device of the edges."""
        permutation = 0 if self.permutation is None else self.permutation.nbytes
        return permutation + self.neighbors.nbytes + self.starts.nbytes

    def blocks(self, size: int) -> list[Block]:
        """Return blocks of at most ``size`` edges and nodes together.

        A node with more edges has a block of its own.
        """
        if size not in self._blocks:
            blocks, node = [], 0
            while node < self.num_nodes:
                weight = int(self._starts[node]) + node
                end = int(torch.searchsorted(self._weights, weight + size, right=True))
                end = max(end, node + 1)
                blocks.append(self._block(node, end))
                node = end
            while len(self._blocks) >= _CACHED_SIZES:
                del self._blocks[next(iter(self._blocks))]
            self._blocks[size] = blocks
        return self._blocks[size]

    def blocks_of_nodes(self, nodes: int) -> list[Block]:
        """Return blocks of ``nodes`` nodes, the last of which may have fewer."""
        firsts = range(0, self.num_nodes, nodes)
        return [self._block(node, min(node + nodes, self.num_nodes)) for node in firsts]

    def starts_of(self, block: Block) -> Tensor:
        """Return the first edge of each node of a block, and the end of the last."""
        return self.starts[block.first_node : block.end_node + 1]

    def positions(self, block: Block) -> Tensor | slice:
        """Return the positions of a block's edges in edge_index."""
        return block.edges if self.permutation is None else self.permutation[block.edges]

    def _block(self, node: int, end: int) -> Block:
        return Block(node, end, int(self._starts[node]), int(self._starts[end]))


class Order(SortedEdges):
    """The edges of a graph, sorted by destination: the neighbors are their sources.

    Args:
        edge_index: Edges [2, E], int64.
        target: The row of edge_index that holds the destinations: 1 for ``source_to_target``.
        num_destinations: Number of destination nodes.

    Attributes:
        num_sources: The smallest number of source nodes that these edges can have.

    Raises:
        IndexError: A node index is negative, or a destination is too large.
    """

    def __init__(self, edge_index: Tensor, target: int, num_destinations: int) -> None:
        sources, destinations = edge_index[1 - target], edge_index[target]
        low, high = (int(bound) for bound in edge_index.aminmax())
        last = int(destinations.max())
        if low < 0:
            raise IndexError(f"has the negative node index {low} in its edge_index")
        if last >= num_destinations:
            raise IndexError(
                f"has an edge to node {last}, but only {num_destinations} destination nodes"
            )
        narrow = torch.int32 if max(edge_index.size(1), high) < 2**31 else torch.int64
        permutation: Tensor | None = None
        if bool((destinations[1:] < destinations[:-1]).any()):
            permutation = destinations.argsort(stable=True)
            sources = sources[permutation]
            permutation = permutation.to(narrow)
        counts = torch.bincount(destinations, minlength=num_destinations)
        super().__init__(counts, sources.to(narrow), permutation)
        self.target = target
        self.num_sources: int = int(sources.max()) + 1

    @property
    def nbytes(self) -> int:
        by_source = self.by_source.nbytes if "by_source" in vars(self) else 0
        return super().nbytes + by_source

    @cached_property
    def by_source(self) -> SortedEdges:
        """The same edges sorted by source, for gradients: the neighbors are the destinations."""
        narrow = self.neighbors.dtype
        nodes = torch.arange(self.num_nodes, dtype=narrow, device=self.neighbors.device)
        destinations = nodes.repeat_interleave(self.starts.diff(), output_size=self.num_edges)
        permutation = self.neighbors.argsort(stable=True).to(narrow)
        destinations = destinations.index_select(0, permutation)
        if self.permutation is not None:
            permutation = self.permutation.index_select(0, permutation)
        counts = torch.bincount(self.neighbors, minlength=self.num_sources)
        return SortedEdges(counts, destinations, permutation)

    def destinations(self, block: Block) -> Tensor:
        """Return the destination of each edge of a block, counted from its first node: int64."""
        return torch.repeat_interleave(self.starts_of(block).diff(), output_size=block.num_edges)


def edges_of(crow: Tensor, col: Tensor) -> Tensor:
    """Return the entries of a sparse matrix as edges [2, E] from columns to rows, in row 1 and 0.

    Args:
        crow: The first entry of each row [N + 1].
        col: The column of each entry [E].

    Raises:
        IndexError: The matrix is not valid: nothing in PyTorch checks that by default.
    """
    counts = crow.diff()
    if int(crow[0]) != 0 or int(crow[-1]) != len(col) or bool((counts < 0).any()):
        raise IndexError  # without words: PyTorch's own product runs
    nodes = torch.arange(len(counts), dtype=torch.int64, device=col.device)
    return torch.stack([nodes.repeat_interleave(counts, output_size=len(col)), col.long()])


@dataclass
class _Entry:
    order: Order
    content: int  # the checksum of the tensors
    forward: int  # the last forward that used the order


class Orders(Recent[_Entry]):
    """A cache of the orders that the last forwards used, so that edges are sorted once.

    A layer may make a new edge_index with equal content in each forward (GATConv adds self-loops),
    so the key is a checksum of the content. The content of a known tensor may change without a
    trace in its version (through NumPy or ``.data``), so its checksum is compared again in each
    forward.

    Attributes:
        seconds: Time spent on sorting and comparing so far.
    """

    def __init__(self) -> None:
        super().__init__()
        self.seconds: float = 0.0

    @property
    def nbytes(self) -> int:
        """Bytes of all orders."""
        orders = {id(entry.order): entry.order for entry in [*self._entries.values()]}
        return sum(order.nbytes for order in orders.values())

    def get(
        self, edge_index: Tensor, target: int, num_destinations: int, confirm: bool = False
    ) -> Order:
        """Return the order of edges.

        Args:
            edge_index: Edges [2, E], int64.
            target: The row of edge_index that holds the destinations.
            num_destinations: Number of destination nodes.
            confirm: Whether the content may have changed within this forward.

        Raises:
            IndexError: A node index is negative, or a destination is too large.
        """
        return self._get((edge_index,), lambda: edge_index, target, num_destinations, confirm)

    def of_matrix(self, crow: Tensor, col: Tensor) -> Order:
        """Return the order of the entries of a sparse matrix, from columns to rows.

        Args:
            crow: As for :func:`edges_of`, and likewise below.
            col: Columns.

        Raises:
            IndexError: The matrix is not valid.
        """
        return self._get((crow, col), lambda: edges_of(crow, col), 0, len(crow) - 1)

    def _get(
        self,
        tensors: tuple[Tensor, ...],
        edges: Callable[[], Tensor],
        target: int,
        num_destinations: int,
        confirm: bool = False,
    ) -> Order:
        """Return the order of the edges that some tensors [..., E] describe."""
        start = time.perf_counter()
        identity = (*map(identity_of, tensors), target, num_destinations)
        entry = self._entries.get(identity)
        if entry is None or confirm or entry.forward != self._forward:
            sums = [checksum(tensor.view(-1, tensor.size(-1))) for tensor in tensors]
            content = int(sums[0] if len(sums) == 1 else checksum(torch.stack(sums)[None]))
            if entry is None or entry.content != content:
                key = content, target, num_destinations, tensors[-1].size(-1), tensors[-1].device
                with torch.inference_mode(False), torch.no_grad():  # autograd may save it later
                    order = self._equal(key) or Order(edges(), target, num_destinations)
                entry = _Entry(order, content, self._forward)
            entry.forward = self._forward
            self._entries[identity] = entry
        self.seconds += time.perf_counter() - start
        return entry.order

    def _equal(self, key: Hashable) -> Order | None:
        for entry in [*self._entries.values()]:
            order, device = entry.order, entry.order.neighbors.device
            if key == (entry.content, order.target, order.num_nodes, order.num_edges, device):
                return order
        return None

    def __getstate__(self) -> dict[str, object]:
        return {**super().__getstate__(), "seconds": 0.0}


def identity_of(tensor: Tensor) -> Hashable:
    """Return a key that is equal for two tensors that show the same elements at one version."""
    where = key_of(tensor), version_of(tensor), tensor.storage_offset()
    return *where, tensor.shape, tensor.stride()
