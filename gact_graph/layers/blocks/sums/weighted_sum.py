"""Weighted sums of source rows: their weights, their values, and their gradients."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from gact_graph.layers.blocks.cuts import Block
from gact_graph.layers.blocks.graph import EdgeGraph
from gact_graph.layers.blocks.order import Order
from gact_graph.layers.blocks.rows import Rows
from gact_graph.layers.blocks.sums import passes
from gact_graph.ops.weighted_sum import weighted_sum, weighted_sum_weights


@dataclass(frozen=True)
class WeightedSum:
    """The sum that is a layer's result.

    Attributes:
        parameter: The parameter of ``message`` that gets the source rows, such as ``x_j``.
        index: Index of the tensor x of these rows in ``Arguments.tensors``.
        weights: Gives the weights of edges [E, ..., 1], then the tensors that the layer keeps.
        of_edges: Whether the weights are made of tensors of edges alone, so that those of all edges
            can be had at once.
    """

    parameter: str
    index: int
    weights: EdgeGraph
    of_edges: bool


@dataclass(frozen=True)
class BlockSum:
    """The weighted sums of a block of D destination nodes and E edges.

    Args:
        x: The node tensor [N, ...].
        sources: The source of each edge [E].
        weight: The weight of each edge [E, ..., 1].
        starts: For each destination node the first of its edges [D + 1].
    """

    x: Tensor | Rows
    sources: Tensor
    weight: Tensor
    starts: Tensor

    @property
    def shape(self) -> tuple[int, ...]:
        """[D, ...]."""
        return len(self.starts) - 1, *self.x.shape[1:]

    @property
    def dtype(self) -> torch.dtype:
        return self.x.dtype

    @property
    def device(self) -> torch.device:
        return self.x.device

    def write(self, out: Tensor) -> None:
        """Writes the sums into ``out`` [D, ...]."""
        rows, index = self._rows()
        weight = as_matrix(self.weight.detach())
        weighted_sum(out.flatten(1), rows, index, weight, None, self.starts)

    def gradient_of_weights(self, gradient: Tensor) -> Tensor:
        """The gradient of the weights [E, ..., 1], from that of the sums [D, ...]."""
        rows, index = self._rows()
        heads = self.weight.flatten(1).size(1)
        found = weighted_sum_weights(as_matrix(gradient), rows, index, self.starts, heads)
        return found.view(self.weight.shape)

    def _rows(self) -> tuple[Tensor, Tensor | None]:
        """A matrix and the row of it for each edge; None where its rows are those of the edges."""
        if isinstance(self.x, Tensor):
            return as_matrix(self.x), self.sources
        return as_matrix(self.x.rows(self.sources.long())), None


@dataclass(frozen=True)
class GraphSum:
    """The weighted sums of all D destination nodes, from the weights of all E edges.

    Args:
        x: The node tensor [N, ...].
        order: The order of the edges.
        weight: The weight of each edge in the order of edge_index [E, ..., 1].
        size: Edges and nodes to take at a time, where messages are made of them.
    """

    x: Tensor | Rows
    order: Order
    weight: Tensor
    size: int

    @property
    def shape(self) -> tuple[int, ...]:
        """[D, ...]."""
        return self.order.num_destinations, *self.x.shape[1:]

    @property
    def dtype(self) -> torch.dtype:
        return self.x.dtype

    @property
    def device(self) -> torch.device:
        return self.x.device

    def write(self, out: Tensor) -> None:
        """Writes the sums into ``out`` [D, ...]."""
        assert isinstance(self.x, Tensor)  # as it is in forward
        passes.sums(out.flatten(1), as_matrix(self.x), self._weight(), self.order, self.size)

    def gradient_of_x(self, gradient: Tensor) -> Tensor:
        """The gradient of x [N, ...], from that of the sums [D, ...]."""
        of_x = self._room()
        given = as_matrix(gradient), self._weight(), self.order, self.size
        passes.gradient_of_rows(of_x.flatten(1), *given)
        return of_x

    def gradients(self, gradient: Tensor) -> tuple[Tensor, Tensor]:
        """The gradients of x [N, ...] and of the weights [E, ..., 1], in one pass."""
        of_x, weight = self._room(), self._weight()
        of_weight = torch.empty_like(weight)
        x = as_matrix(self.x) if isinstance(self.x, Tensor) else self.x
        given = as_matrix(gradient), x, weight, self.order, self.size
        passes.gradients(of_x.flatten(1), of_weight, *given)
        return of_x, of_weight.view(self.weight.shape)

    def _room(self) -> Tensor:
        return torch.empty(self.x.shape, dtype=self.dtype, device=self.device)

    def _weight(self) -> Tensor:
        return as_matrix(self.weight.detach())


class CollectedWeights:
    """The weights of all edges, filled in block by block: zeros for a block that gives none.

    Args:
        order: The order of the edges.
    """

    def __init__(self, order: Order) -> None:
        self._order = order
        self._weight: Tensor | None = None

    def put(self, block: Block, weight: Tensor) -> None:
        """Takes the weights [E, ..., 1] of a block."""
        if self._weight is None:
            self._weight = weight.new_zeros(self._order.num_edges, *weight.shape[1:])
        positions = self._order.positions(block)
        if isinstance(positions, slice):
            self._weight[positions] = weight
        else:
            self._weight.index_copy_(0, positions.long(), weight)

    def sum(self, x: Tensor | Rows, size: int) -> GraphSum | None:
        """The sums with these weights; None if no block gave any."""
        if self._weight is None:
            return None
        return GraphSum(x, self._order, self._weight, size)


def can_sum(x: Tensor) -> bool:
    """Whether the operator can read the rows of this node tensor."""
    return x.dtype in (torch.float32, torch.float64) and x.is_contiguous()


def as_matrix(tensor: Tensor) -> Tensor:
    """[N, ...] as [N, W]."""
    return tensor.contiguous().flatten(1)
