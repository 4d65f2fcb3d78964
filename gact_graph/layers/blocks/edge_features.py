"""Linear functions of edge features in attention, without a row of H * C numbers for an edge.

D is the number of features of an edge, H the number of heads, and C the number of channels.
"""

from __future__ import annotations

import torch
from torch import Tensor

from gact_graph.layers.blocks.order import Block, Order
from gact_graph.ops.weighted_sum import weighted_sum, weighted_sum_weights
from gact_graph.support.part import piece

_SUMMED_EDGES = 256
"""Edges whose products are summed by themselves, so that errors do not grow with E."""

_GRADIENT_EDGES = 1 << 14
"""Edges whose gradients of features are computed at a time."""


def edge_scores(features: Tensor, matrix: Tensor, vector: Tensor) -> Tensor:
    """Return GAT's scores of edges: the dot product of a vector and the projected features.

    As both are linear, they are one matrix [H, D].

    Shapes:
        - ``features``: [E, D] or [E]; ``matrix``: [H * C, D]; ``vector``: [1, H, C];
        - output: [E, H].
    """
    return _as_matrix(features) @ _product(matrix, vector).t()


def edge_score_gradients(
    gradient: Tensor, features: Tensor, matrix: Tensor, vector: Tensor, of_features: bool
) -> tuple[Tensor | None, Tensor, Tensor]:
    """Return the gradients of the inputs of :func:`edge_scores`.

    Args:
        gradient: The gradient of the scores [E, H].
        features: As in :func:`edge_scores`.
        matrix: As in :func:`edge_scores`.
        vector: As in :func:`edge_scores`.
        of_features: Whether the gradient of the features is needed; else it is None.
    """
    of_product = _sum_of_products(gradient, _as_matrix(features)).unsqueeze(1)
    of_matrix = (of_product * vector[0].unsqueeze(-1)).view_as(matrix)
    of_vector = (of_product * _by_head(matrix, vector)).sum(-1).view_as(vector)
    if not of_features:
        return None, of_matrix, of_vector
    return (gradient @ _product(matrix, vector)).view_as(features), of_matrix, of_vector


def _as_matrix(features: Tensor) -> Tensor:
    return features.unsqueeze(1) if features.dim() == 1 else features


def _by_head(matrix: Tensor, vector: Tensor) -> Tensor:
    """Return the matrix as [H, C, D]."""
    return matrix.reshape(*vector.shape[1:], -1)


def _product(matrix: Tensor, vector: Tensor) -> Tensor:
    """Return the matrix [H, D] that makes scores of features."""
    return (_by_head(matrix, vector) * vector[0].unsqueeze(-1)).sum(1)


def _sum_of_products(left: Tensor, right: Tensor) -> Tensor:
    """Return the sum over E of the products of rows [E, H] and [E, D]: [H, D]."""
    count = len(left) // _SUMMED_EDGES
    end = count * _SUMMED_EDGES
    lefts, rights = (
        x[:end].unflatten(0, (count, _SUMMED_EDGES))
        for x in (left.contiguous(), right.contiguous())
    )
    return torch.bmm(lefts.mT, rights).sum(0) + left[end:].t() @ right[end:]


class LinearEdgeFeatures:
    """The rows [E, H, C] that TransformerConv adds to keys and values, never materialized.

    As the matrix is linear, the dot product of such a row with a query is the dot product of the
    features with the projected query, and a weighted sum of rows is the projection of a weighted
    sum of features. Both have D numbers for each head.

    Args:
        features: [E, D].
        matrix: [H * C, D].
        heads: H.
        order: The order of the edges.

    Attributes:
        of_features: The gradient of the features; None until :meth:`add_gradients` adds to it.
        of_matrix: The gradient of the matrix, likewise.
    """

    def __init__(self, features: Tensor, matrix: Tensor, heads: int, order: Order) -> None:
        self.of_features: Tensor | None = None
        self.of_matrix: Tensor | None = None
        self._features, self._order = features, order
        self._matrix = matrix.reshape(heads, -1, features.size(1))

    def dots(self, rows: Tensor, block: Block | None = None) -> Tensor:
        """Return the dot products of the rows of edges with rows of their destinations.

        Args:
            rows: Rows of destinations [R, H, C].
            block: The block of these destinations; None for all.

        Returns:
            [edges of the block, H], sorted by destination.
        """
        features, starts = self._features, self._order.starts
        permutation = self._order.permutation
        if block is not None:
            starts = self._order.starts_of(block)
            if permutation is None:
                features = features[block.edges]
            else:
                permutation = permutation[block.edges]
        return torch.cat(
            [
                weighted_sum_weights(of_head, features, permutation, starts, 1)
                for of_head in self._project(rows)
            ],
            1,
        )

    def feature_sums(self, weight: Tensor) -> Tensor:
        """Return the sums of features at destinations [H, R, D], for weights [E, H]."""
        order = self._order
        out = self._features.new_empty(weight.size(1), order.num_nodes, self._features.size(1))
        for of_head, weights in zip(out, weight.unbind(1), strict=True):
            weighted_sum(
                *(of_head, self._features, order.permutation),
                *(weights.unsqueeze(1).contiguous(), order.permutation, order.starts),
            )
        return out

    def row_sums(self, feature_sums: Tensor) -> Tensor:
        """Return the sums of rows [R, H, C], for sums of features [H, R, D]."""
        return torch.bmm(feature_sums, self._matrix.mT).transpose(0, 1)

    def add_gradients(self, rows: Tensor, weight: Tensor, of_features: bool) -> Tensor:
        """Add to the gradients, where that of an edge is a row of its destination times a weight.

        Args:
            rows: Rows of destinations [R, H, C].
            weight: The weights of edges [E, H], in the order of edge_index.
            of_features: Whether the gradient of the features is needed.

        Returns:
            ``feature_sums(weight)``.
        """
        sums = self.feature_sums(weight)
        by_head = zip(rows.unbind(1), sums, strict=True)
        of_matrix = torch.cat([_sum_of_products(*both) for both in by_head])
        self.of_matrix = of_matrix if self.of_matrix is None else self.of_matrix + of_matrix
        if of_features:
            if self.of_features is None:
                self.of_features = torch.zeros_like(self._features)
            projected = self._project(rows)
            for block in self._order.blocks(piece(_GRADIENT_EDGES, rows.device)):
                positions, nodes = self._order.positions(block), self._order.destinations(block)
                of_edges = projected[:, block.nodes].index_select(1, nodes)
                of_edges = of_edges * weight[positions].t().unsqueeze(-1)
                self.of_features[positions] += of_edges.sum(0)
        return sums

    def _project(self, rows: Tensor) -> Tensor:
        """Return rows of destinations [R, H, C] as vectors of features [H, R, D]."""
        return torch.bmm(rows.transpose(0, 1), self._matrix)
