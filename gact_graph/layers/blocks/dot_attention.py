"""Attention by dot products within ``propagate``: TransformerConv's.

N is the number of nodes, E of edges, H of heads, and C of channels.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from gact_graph.layers.blocks.arguments import Input
from gact_graph.layers.blocks.attention import Attention
from gact_graph.layers.blocks.edge_features import LinearEdgeFeatures
from gact_graph.layers.blocks.order import Order
from gact_graph.layers.blocks.rows import CodedRows, rows_at_a_time, rows_of, whole
from gact_graph.layers.blocks.weighted_sum import sum_edges, sum_gradients
from gact_graph.ops.dot_attention import dot_attention, dot_attention_backward, drop_weights
from gact_graph.ops.reference.dot_attention import differentiable_dot_attention


@dataclass(frozen=True)
class DotAttention(Attention):
    """The sum of source values [N, H, C], weighted by the softmax of scaled dot products.

    The score of an edge is the scaled dot product of the key at its source and the query at its
    destination. The inputs are keys, queries and values, then, if edges add rows to keys and
    values, the features and the matrix of :class:`LinearEdgeFeatures`.

    Attributes:
        scale: The factor of dot products.
        keeps: Whether the weights before dropout [E, H] are left in an attribute, as second output.
    """

    scale: float
    keeps: bool

    def outputs(self, inputs: Sequence[Tensor], order: Order) -> list[Tensor]:
        key, query, value, *linear = inputs
        features = self._edge_features(linear, key.size(1), order)
        weight = self._weights(key, query, features, order)
        kept = [weight] if self.keeps else []
        out = value.new_empty(query.shape)
        weight = self._dropped(weight, self._seed())
        sum_edges(out, value, weight, order, order.num_edges)
        if features is not None:
            out += features.row_sums(features.feature_sums(weight))
        return [out, *kept]

    def gradients(
        self, inputs: Sequence[Input], gradients: Sequence[Tensor | None], order: Order
    ) -> Sequence[Tensor | None]:
        # Only one quantized tensor is decoded as a whole at a time.
        key, query, value, *linear = (entry.value for entry in inputs)
        of_out, of_kept = gradients if self.keeps else (*gradients, None)
        keys, features = whole(key), self._edge_features(linear, key.shape[1], order)
        of_features = bool(linear) and inputs[3].requires_grad
        weight = self._weights(keys, query, features, order)
        of_value: Tensor | None = None
        if of_out is None:
            assert of_kept is not None
            of_weight = of_kept.clone(memory_format=torch.contiguous_format)
        else:
            of_out, seed = of_out.contiguous(), self._seed()
            dropped = self._dropped(weight, seed)
            of_value, of_weight = sum_gradients(of_out, value, dropped, order, order.num_edges)
            if features is not None:
                features.add_gradients(of_out, dropped, of_features)
                dots = features.dots(of_out)
                if order.permutation is None:
                    of_weight += dots
                else:
                    of_weight.index_add_(0, order.permutation, dots)
            del dropped
            if self.dropout:
                drop_weights(of_weight, self.dropout, seed)
            if of_kept is not None:
                of_weight += of_kept
        dot_attention_backward(of_weight, weight, order.permutation, order.starts, self.scale)
        del weight
        of_query = keys.new_empty(query.shape)
        sum_edges(of_query, keys, of_weight, order, order.num_edges)
        del keys
        queries = whole(query)
        of_key = queries.new_empty(key.shape)
        sum_edges(of_key, queries, of_weight, order.by_source, order.num_edges)
        if features is None:
            return of_key, of_query, of_value
        sums = features.add_gradients(queries, of_weight, of_features)
        of_query += features.row_sums(sums)
        return of_key, of_query, of_value, features.of_features, features.of_matrix

    def reference(self, inputs: Sequence[Tensor], order: Order) -> Sequence[Tensor]:
        key, query, value, *linear = inputs
        rows = None
        if linear:
            features, matrix = linear
            positions = slice(None) if order.permutation is None else order.permutation
            rows = (rows_of(features, positions) @ matrix.t()).view(-1, *key.shape[1:])
        edges = order.neighbors, order.permutation, order.starts
        settings = self.scale, self.dropout, self._seed()
        out, weight = differentiable_dot_attention(key, query, value, rows, *edges, *settings)
        return (out, weight) if self.keeps else (out,)

    def _edge_features(
        self, linear: Sequence[Tensor | CodedRows], heads: int, order: Order
    ) -> LinearEdgeFeatures | None:
        if not linear:
            return None
        features, matrix = map(whole, linear)
        return LinearEdgeFeatures(features, matrix, heads, order)

    def _weights(
        self,
        key: Tensor,
        query: Tensor | CodedRows,
        features: LinearEdgeFeatures | None,
        order: Order,
    ) -> Tensor:
        """Return the weights before dropout [E, H], in the order of edge_index."""
        out, positions = key.new_empty(order.num_edges, key.size(1)), order.permutation
        for block in order.blocks_of_nodes(rows_at_a_time(query)):
            edges = block.edges
            part, places = (out[edges], None) if positions is None else (out, positions[edges])
            rows = rows_of(query, block.nodes)
            dots = None if features is None else features.dots(rows, block)
            dot_attention(
                *(part, key.flatten(1), rows.flatten(1).contiguous(), dots),
                *(order.neighbors[edges], places, order.starts_of(block), self.scale),
            )
        return out

    def _dropped(self, weight: Tensor, seed: int) -> Tensor:
        """Return the weights after dropout; the same tensor without dropout."""
        if not self.dropout:
            return weight
        dropped = weight.clone()
        drop_weights(dropped, self.dropout, seed)
        return dropped
