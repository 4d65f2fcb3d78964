"""What the features of edges add to keys and values of attention by dot products."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from gact_graph.layers.blocks.cuts import Block, starts_of
from gact_graph.layers.blocks.edge_terms import sum_of_products
from gact_graph.layers.blocks.order import Order
from gact_graph.ops.weighted_sum import weighted_sum, weighted_sum_weights

_EDGES = 1 << 14
"""Edges whose gradients of features are found at a time."""


@dataclass(frozen=True)
class EdgeRows:
    """TransformerConv's: what a matrix makes of the features is added to key and value of an edge.

    Attributes:
        features: Index of the features [E, D] in ``Arguments.tensors``.
        matrix: Index of the matrix [H * C, D] in ``Snapshot.learning``.
    """

    features: int
    matrix: int


@dataclass(frozen=True)
class MadeRows:
    """The rows [E, H, C] that a matrix makes of features; it is taken to what they meet instead.

    As the matrix is linear, a row's dot product with a query is that of the features with what the
    matrix makes of the query, and a sum of rows is what it makes of a sum of features. Both have D
    numbers for each head, and no edge has a row of H * C.

    Attributes:
        features: [K, D].
        matrix: [H * C, D].
        heads: H.
        places: The place of each edge's features, and of its weights [E]; None: edge e has place e.
        starts: For each destination the first of its edges [R + 1].
    """

    features: Tensor
    matrix: Tensor
    heads: int
    places: Tensor | None
    starts: Tensor

    @property
    def by_head(self) -> Tensor:
        """The matrix [H, C, D]."""
        return self.matrix.reshape(self.heads, -1, self.features.size(1))

    def met(self, rows: Tensor) -> Tensor:
        """What the matrix makes of rows [R, H, C] that meet those of edges: [H, R, D]."""
        return torch.bmm(rows.transpose(0, 1), self.by_head)

    def dots(self, rows: Tensor) -> Tensor:
        """The dot products with the rows of destinations [R, H, C]: [E, H], sorted as edges are."""
        given = self.features, self.places, self.starts, 1
        return torch.cat([weighted_sum_weights(one, *given) for one in self.met(rows)], 1)

    def sums(self, weight: Tensor) -> Tensor:
        """The features of each destination's edges, added up by weights [K, H]: [H, R, D]."""
        shape = self.heads, len(self.starts) - 1, self.features.size(1)
        out = self.features.new_empty(shape)
        for one, of_head in zip(out, weight.unbind(1), strict=True):
            given = self.places, of_head.unsqueeze(1).contiguous(), self.places, self.starts
            weighted_sum(one, self.features, *given)
        return out

    def added_up(self, sums: Tensor) -> Tensor:
        """The rows of edges added up, of their features added up [H, R, D]: [R, H, C]."""
        return torch.bmm(sums, self.by_head.mT).transpose(0, 1)

    def of_nodes(self, block: Block) -> MadeRows:
        """Those of the edges of some destinations."""
        features, places, edges = self.features, self.places, block.edges
        if places is None:
            features = features[edges]
        else:
            places = places[edges]
        return replace(self, features=features, places=places, starts=starts_of(self.starts, block))


class RowGradients:
    """Adds up the gradients of what rows of edges are made of.

    Args:
        made: The rows.
        order: The order of the edges.
        learns: Whether the features have a gradient, too.

    Attributes:
        made: The same.
        of_matrix: [H * C, D].
        of_features: [E, D]; None if there is none.
    """

    def __init__(self, made: MadeRows, order: Order, learns: bool) -> None:
        self.made, self._order = made, order
        self.of_matrix = torch.zeros_like(made.matrix, memory_format=torch.contiguous_format)
        self.of_features = torch.zeros_like(made.features) if learns else None

    def add(self, rows: Tensor, weight: Tensor) -> Tensor:
        """Adds those of rows of edges whose gradients are rows of destinations times weights.

        Args:
            rows: Of destinations [R, H, C].
            weight: [E, H], in the order of edge_index.

        Returns:
            ``made.sums(weight)``.
        """
        sums = self.made.sums(weight)
        by_head = zip(rows.unbind(1), sums, strict=True)
        self.of_matrix += torch.cat([sum_of_products(*both) for both in by_head])
        if self.of_features is not None:
            met = self.made.met(rows)
            for block in self._order.cuts.blocks(_EDGES):
                places, nodes = self._order.positions(block), self._order.destinations(block)
                of_edges = met[:, block.nodes].index_select(1, nodes)
                self.of_features[places] += (of_edges * weight[places].t().unsqueeze(-1)).sum(0)
        return sums
