"""Attention computed by operators: GAT's and GATv2's, whose result is the weights of edges.

N is the number of nodes, E of edges, H of heads, and C of channels.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from gact_graph.layers.blocks.arguments import Input
from gact_graph.layers.blocks.edge_features import edge_score_gradients, edge_scores
from gact_graph.layers.blocks.order import Order
from gact_graph.layers.blocks.rows import CodedRows, rows_at_a_time, rows_of, whole
from gact_graph.ops import attention as sums
from gact_graph.ops import leaky_attention as leaky
from gact_graph.ops.reference.attention import differentiable_attention
from gact_graph.ops.reference.leaky_attention import differentiable_leaky_attention


@dataclass(frozen=True)
class Attention(ABC):
    """Attention computed by operators that materialize no row of an edge.

    The random state must be the same at the start of each method: dropout draws its seed from it.

    Attributes:
        inputs: Indices of its inputs in ``Arguments.tensors``.
        dropout: The probability that a weight becomes 0.
    """

    inputs: tuple[int, ...]
    dropout: float

    @abstractmethod
    def outputs(self, inputs: Sequence[Tensor], order: Order) -> list[Tensor]:
        """Return the outputs of a call, as in ``BlockedCall.outputs``."""

    @abstractmethod
    def gradients(
        self, inputs: Sequence[Input], gradients: Sequence[Tensor | None], order: Order
    ) -> Sequence[Tensor | None]:
        """Return the gradients of the inputs; None for no gradient.

        Args:
            inputs: The inputs, of which tensors of nodes may be quantized.
            gradients: The gradients of the outputs, of which at least one is not None.
            order: The order of the edges.
        """

    @abstractmethod
    def reference(self, inputs: Sequence[Tensor], order: Order) -> Sequence[Tensor]:
        """Return the outputs, by operations that can be differentiated twice."""

    def _seed(self) -> int:
        return int(torch.randint(2**63 - 1, (), device="cpu")) if self.dropout else 0


@dataclass(frozen=True)
class EdgeAttention(Attention):
    """The attention of an ``edge_update``, whose result is the weights of edges [E, H].

    Attributes:
        slope: The negative slope of LeakyReLU.
    """

    slope: float

    _operator: ClassVar[Callable[..., None]]
    _reference: ClassVar[Callable[..., Tensor]]

    def outputs(self, inputs: Sequence[Tensor], order: Order) -> list[Tensor]:
        out = inputs[0].new_empty(order.num_edges, inputs[0].size(1))
        type(self)._operator(out, *self._operands(inputs, order))
        return [out]

    def reference(self, inputs: Sequence[Tensor], order: Order) -> Sequence[Tensor]:
        return (type(self)._reference(*self._operands(inputs, order)),)

    def _operands(self, inputs: Sequence[Tensor], order: Order) -> Sequence[Any]:
        edges = order.neighbors, order.permutation, order.starts
        return *self._tensors(inputs), *edges, self.slope, self.dropout, self._seed()

    @abstractmethod
    def _tensors(self, inputs: Sequence[Tensor]) -> Sequence[Tensor | None]:
        """Return the tensors that the operator takes."""


@dataclass(frozen=True)
class SumAttention(EdgeAttention):
    """GAT's attention: the score of an edge is LeakyReLU of a sum of scores [N, H] of both ends.

    The inputs are the scores of the sources and of the destinations, then, if edges add scores, the
    ``features``, ``matrix`` and ``vector`` of :func:`edge_scores`.
    """

    _operator = staticmethod(sums.attention)
    _reference = staticmethod(differentiable_attention)

    def gradients(
        self, inputs: Sequence[Input], gradients: Sequence[Tensor | None], order: Order
    ) -> Sequence[Tensor | None]:
        gradient, tensors = _only(gradients), [whole(entry.value) for entry in inputs]
        source, destination, *linear = tensors
        of_score, of_destination = torch.empty_like(gradient), torch.empty_like(destination)
        sums.attention_backward(of_score, of_destination, gradient, *self._operands(tensors, order))
        of_source = torch.zeros_like(source)
        positions, starts = order.by_source.permutation, order.by_source.starts
        assert positions is not None
        sums.segment_sum(of_source[: order.num_sources], of_score, positions, starts)
        if not linear:
            return of_source, of_destination
        features, matrix, vector = linear
        of_linear = edge_score_gradients(
            of_score, features, matrix, vector, inputs[2].requires_grad
        )
        return of_source, of_destination, *of_linear

    def _tensors(self, inputs: Sequence[Tensor]) -> Sequence[Tensor | None]:
        source, destination, *linear = inputs
        return source, destination, edge_scores(*linear) if linear else None


@dataclass(frozen=True)
class LeakyAttention(EdgeAttention):
    """GATv2's attention: the score of an edge is the dot product of a vector [1, H, C] with
    LeakyReLU of the sum of the rows [N, H, C] of both ends.

    The inputs are the rows of the sources, those of the destinations, and the vector.
    """

    _operator = staticmethod(leaky.leaky_attention)
    _reference = staticmethod(differentiable_leaky_attention)

    def gradients(
        self, inputs: Sequence[Input], gradients: Sequence[Tensor | None], order: Order
    ) -> Sequence[Tensor | None]:
        gradient = _only(gradients)
        sources, destinations = (entry.value for entry in inputs[:2])
        vector = inputs[2].tensor.detach()[0].contiguous()
        of_score = torch.empty_like(gradient)
        # Only one quantized tensor is decoded as a whole at a time.
        of_destination, of_vector = self._of_destinations(
            of_score, gradient, whole(sources).flatten(1), destinations, vector, order
        )
        destination = whole(destinations).flatten(1)
        of_source = self._of_sources(of_score, sources, destination, vector, order)
        return of_source, of_destination, of_vector.unsqueeze(0)

    def _of_destinations(
        self,
        of_score: Tensor,
        gradient: Tensor,
        source: Tensor,
        destinations: Tensor | CodedRows,
        vector: Tensor,
        order: Order,
    ) -> tuple[Tensor, Tensor]:
        """Return the gradients of the destinations and the vector; write those of the scores."""
        of_destination = source.new_empty(destinations.shape)
        of_vector, of_part = torch.zeros_like(vector), torch.empty_like(vector)
        positions = order.permutation
        if positions is None:  # the mask of dropout depends on positions among all edges
            kind, device = order.neighbors.dtype, order.neighbors.device
            positions = torch.arange(order.num_edges, dtype=kind, device=device)
        settings = self.slope, self.dropout, self._seed()
        for block in order.blocks_of_nodes(rows_at_a_time(destinations)):
            rows = rows_of(destinations, block.nodes).flatten(1).contiguous()
            edges = order.neighbors[block.edges], positions[block.edges], order.starts_of(block)
            outputs = of_score, of_destination[block.nodes].flatten(1), of_part
            leaky.leaky_attention_backward(
                *outputs, gradient, source, rows, vector, *edges, *settings
            )
            of_vector += of_part
        return of_destination, of_vector

    def _of_sources(
        self,
        of_score: Tensor,
        sources: Tensor | CodedRows,
        destination: Tensor,
        vector: Tensor,
        order: Order,
    ) -> Tensor:
        of_source, by_source = destination.new_empty(sources.shape), order.by_source
        of_source[order.num_sources :] = 0
        positions = by_source.permutation
        assert positions is not None
        for block in by_source.blocks_of_nodes(rows_at_a_time(sources)):
            rows = rows_of(sources, block.nodes).flatten(1).contiguous()
            edges = by_source.neighbors[block.edges], positions[block.edges]
            leaky.leaky_attention_source(
                of_source[block.nodes].flatten(1),
                *(of_score, rows, destination, vector, *edges),
                by_source.starts_of(block),
                self.slope,
            )
        return of_source

    def _tensors(self, inputs: Sequence[Tensor]) -> Sequence[Tensor | None]:
        source, destination, vector = inputs
        return source.flatten(1), destination.flatten(1), vector[0].contiguous()


def _only(gradients: Sequence[Tensor | None]) -> Tensor:
    """Return the gradient of the only output, which is not None."""
    (gradient,) = gradients
    assert gradient is not None
    return gradient.contiguous()
