"""Attention by dot products within ``propagate``: TransformerConv's."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from gact_graph.layers.blocks.attention import Attention
from gact_graph.layers.blocks.cuts import starts_of
from gact_graph.layers.blocks.edge_rows import EdgeRows, MadeRows, RowGradients
from gact_graph.layers.blocks.order import Order
from gact_graph.layers.blocks.rows import Rows, rows_at_a_time, rows_of, whole
from gact_graph.layers.blocks.sums import passes
from gact_graph.ops.dot_attention import dot_attention, dot_attention_backward, drop_weights
from gact_graph.ops.reference.dot_attention import differentiable_dot_attention


@dataclass(frozen=True)
class DotAttention(Attention):
    """The score of an edge is the scaled dot product of the key at its source and the query at its
    destination, and the result of the call is the sum of values [N, H, C] by these weights.

    Attributes:
        value: Index of the values in ``Arguments.tensors``.
        scale: What dot products are multiplied by.
        keeps: Whether the weights before dropout [E, H] are left in an attribute, too.
        rows: What edges add to their keys and values; None for nothing.
    """

    value: int
    scale: float
    keeps: bool
    rows: EdgeRows | None

    @property
    def tensors(self) -> tuple[int, ...]:
        features = () if self.rows is None else (self.rows.features,)
        return self.source, self.destination, self.value, *features

    @property
    def parameters(self) -> tuple[int, ...]:
        return () if self.rows is None else (self.rows.matrix,)

    def outputs(
        self, tensors: Sequence[Tensor], learning: Sequence[Tensor], order: Order
    ) -> list[Tensor]:
        key, query, value = (tensors[i] for i in (self.source, self.destination, self.value))
        made = self._made(tensors, learning, order)
        weight = self._weights(key, query, made, order)
        kept = [weight] if self.keeps else []
        out = value.new_empty(query.shape)
        left = self._dropped(weight, self._seed())
        passes.sums(out.flatten(1), value.flatten(1), left, order, order.num_edges)
        if made is not None:
            out += made.added_up(made.sums(left))
        return [out, *kept]

    def gradients(
        self,
        tensors: Sequence[Tensor | Rows],
        learning: Sequence[Tensor],
        order: Order,
        gradients: Sequence[Tensor | None],
        learns: Sequence[bool],
    ) -> tuple[Tensor | None, ...]:
        # Of tensors that are coded only one is decoded as a whole at a time.
        key, query, value = (tensors[i] for i in (self.source, self.destination, self.value))
        of_out, of_kept = gradients if self.keeps else (*gradients, None)
        keys, made, found = whole(key), self._made(tensors, learning, order), None
        if self.rows is not None and made is not None:
            found = RowGradients(made, order, learns[self.rows.features])
        weight = self._weights(keys, query, made, order)
        of_value: Tensor | None = None
        if of_out is None:
            assert of_kept is not None
            of_weight = of_kept.clone(memory_format=torch.contiguous_format)
        else:
            of_value, of_weight = self._of_sum(of_out, value, weight, found, order)
            if of_kept is not None:
                of_weight += of_kept
        dot_attention_backward(of_weight, weight, order.permutation, order.starts, self.scale)
        del weight
        of_query = keys.new_empty(query.shape)
        passes.sums(of_query.flatten(1), keys.flatten(1), of_weight, order, order.num_edges)
        del keys
        queries = whole(query)
        of_key = queries.new_empty(key.shape)
        given = queries.flatten(1), of_weight, order, order.num_edges
        passes.gradient_of_rows(of_key.flatten(1), *given)
        if found is None:
            return of_key, of_query, of_value
        of_query += found.made.added_up(found.add(queries, of_weight))
        return of_key, of_query, of_value, found.of_features, found.of_matrix

    def _of_sum(
        self,
        gradient: Tensor,
        value: Tensor | Rows,
        weight: Tensor,
        found: RowGradients | None,
        order: Order,
    ) -> tuple[Tensor, Tensor]:
        """The gradients of the values and of the weights before dropout, from that of the sum."""
        seed, gradient = self._seed(), gradient.contiguous()
        of_value, of_weight = gradient.new_empty(value.shape), torch.empty_like(weight)
        left = self._dropped(weight, seed)
        passes.gradients(
            of_value.flatten(1),
            of_weight,
            gradient.flatten(1),
            value.contiguous() if isinstance(value, Tensor) else value,
            left,
            order,
            order.num_edges,
        )
        if found is not None:
            found.add(gradient, left)
            dots = found.made.dots(gradient)
            if order.permutation is None:
                of_weight += dots
            else:
                of_weight.index_add_(0, order.permutation, dots)
        if self.dropout:
            drop_weights(of_weight, self.dropout, seed)
        return of_value, of_weight

    def written_out(self, read: Sequence[Tensor], order: Order) -> Sequence[Tensor]:
        edges = order.sources, order.permutation, order.starts
        key, query, value, *made_of = read
        rows = None
        if made_of:
            features, matrix = made_of
            at = slice(None) if order.permutation is None else order.permutation
            rows = (rows_of(features, at) @ matrix.t()).view(-1, *key.shape[1:])
        settings = self.scale, self.dropout, self._seed()
        out, weight = differentiable_dot_attention(key, query, value, rows, *edges, *settings)
        return (out, weight) if self.keeps else (out,)

    def _made(
        self, tensors: Sequence[Tensor | Rows], learning: Sequence[Tensor], order: Order
    ) -> MadeRows | None:
        if self.rows is None:
            return None
        features, heads = tensors[self.rows.features], tensors[self.source].shape[1]
        matrix = learning[self.rows.matrix]
        return MadeRows(whole(features), matrix, heads, order.permutation, order.starts)

    def _weights(
        self, key: Tensor, query: Tensor | Rows, made: MadeRows | None, order: Order
    ) -> Tensor:
        """The weights before dropout [E, H], in the order of edge_index."""
        out, positions = key.new_empty(order.num_edges, key.size(1)), order.permutation
        for block in order.cuts.blocks_of_nodes(rows_at_a_time(query)):
            edges = block.edges
            to, places = (out[edges], None) if positions is None else (out, positions[edges])
            rows = rows_of(query, block.nodes)
            starts = starts_of(order.starts, block)
            terms = None if made is None else made.of_nodes(block).dots(rows)
            ends = key.flatten(1), rows.flatten(1).contiguous()
            dot_attention(to, *ends, terms, order.sources[edges], places, starts, self.scale)
        return out

    def _dropped(self, weight: Tensor, seed: int) -> Tensor:
        """The weights after dropout; the same tensor where there is none."""
        if not self.dropout:
            return weight
        left = weight.clone()
        drop_weights(left, self.dropout, seed)
        return left
