"""Attention whose weights are the result of an ``edge_update``: GAT's and GATv2's."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from gact_graph.layers.blocks.attention import Attention
from gact_graph.layers.blocks.cuts import starts_of
from gact_graph.layers.blocks.edge_terms import EdgeTerms
from gact_graph.layers.blocks.order import Order
from gact_graph.layers.blocks.rows import Rows, rows_at_a_time, rows_of, whole
from gact_graph.ops import attention as sums
from gact_graph.ops import leaky_attention as leaky
from gact_graph.ops.reference import attention as sums_reference
from gact_graph.ops.reference import leaky_attention as leaky_reference


@dataclass(frozen=True)
class EdgeAttention(Attention):
    """The attention that an ``edge_update`` computes: its result is the weights of edges [E, H].

    Attributes:
        slope: Of LeakyReLU.
    """

    slope: float

    _attend: ClassVar[Callable[..., None]]
    _written_out: ClassVar[Callable[..., Tensor]]

    def outputs(
        self, tensors: Sequence[Tensor], learning: Sequence[Tensor], order: Order
    ) -> list[Tensor]:
        read = self._read([tensors[i] for i in self.tensors], learning)
        edges = order.sources, order.permutation, order.starts
        out = tensors[self.source].new_empty(order.num_edges, tensors[self.source].size(1))
        type(self)._attend(out, *read, *edges, self.slope, self.dropout, self._seed())
        return [out]

    def gradients(
        self,
        tensors: Sequence[Tensor | Rows],
        learning: Sequence[Tensor],
        order: Order,
        gradients: Sequence[Tensor | None],
        learns: Sequence[bool],
    ) -> tuple[Tensor | None, ...]:
        assert gradients[0] is not None  # the only one
        return self._gradients(tensors, learning, order, gradients[0].contiguous(), learns)

    @abstractmethod
    def _gradients(
        self,
        tensors: Sequence[Tensor | Rows],
        learning: Sequence[Tensor],
        order: Order,
        gradient: Tensor,
        learns: Sequence[bool],
    ) -> tuple[Tensor | None, ...]:
        """See :meth:`gradients`; ``gradient`` is that of the weights [E, H]."""

    def written_out(self, read: Sequence[Tensor], order: Order) -> Sequence[Tensor]:
        edges = order.sources, order.permutation, order.starts
        settings = self.slope, self.dropout, self._seed()
        return (type(self)._written_out(*self._matrices(read), *edges, *settings),)

    def _read(
        self, tensors: Sequence[Tensor], learning: Sequence[Tensor]
    ) -> Sequence[Tensor | None]:
        return self._matrices([*tensors, *(learning[i] for i in self.parameters)])

    @abstractmethod
    def _matrices(self, read: Sequence[Tensor]) -> Sequence[Tensor | None]:
        """What the operator takes, of :attr:`tensors` and then :attr:`parameters`."""


@dataclass(frozen=True)
class SumAttention(EdgeAttention):
    """GAT's: the score of an edge is LeakyReLU of the sum of what both ends have [N, H].

    Attributes:
        terms: What the edge adds to this sum; None for nothing.
    """

    terms: EdgeTerms | None = None

    _attend = staticmethod(sums.attention)
    _written_out = staticmethod(sums_reference.differentiable_attention)

    @property
    def tensors(self) -> tuple[int, ...]:
        features = () if self.terms is None else (self.terms.features,)
        return *super().tensors, *features

    @property
    def parameters(self) -> tuple[int, ...]:
        return () if self.terms is None else self.terms.parameters

    def _gradients(
        self,
        tensors: Sequence[Tensor | Rows],
        learning: Sequence[Tensor],
        order: Order,
        gradient: Tensor,
        learns: Sequence[bool],
    ) -> tuple[Tensor | None, ...]:
        read = [whole(tensors[i]) for i in self.tensors]
        source, destination = read[:2]
        terms = self._read(read, learning)[-1]
        of_score, of_destination = torch.empty_like(gradient), torch.empty_like(destination)
        edges = order.sources, order.permutation, order.starts
        settings = self.slope, self.dropout, self._seed()
        sums.attention_backward(
            of_score, of_destination, gradient, source, destination, terms, *edges, *settings
        )
        del terms
        of_source = torch.zeros_like(source)
        by_source = order.by_source
        out = of_source[: order.num_sources]
        sums.segment_sum(out, of_score, by_source.positions, by_source.cuts.starts)
        if self.terms is None:
            return of_source, of_destination
        matrix, vector = (learning[i] for i in self.parameters)
        made_of = read[2], matrix, vector
        found = self.terms.gradients(of_score, *made_of, learns[self.terms.features])
        return of_source, of_destination, *found

    def _matrices(self, read: Sequence[Tensor]) -> Sequence[Tensor | None]:
        source, destination, *made_of = read
        return source, destination, None if self.terms is None else self.terms.of(*made_of)


@dataclass(frozen=True)
class LeakyAttention(EdgeAttention):
    """GATv2's: the score of an edge is the dot product of a parameter [1, H, C] with LeakyReLU of
    the sum of the rows [N, H, C] of both ends.

    Attributes:
        att: Index of the parameter in ``Snapshot.learning``.
    """

    att: int

    _attend = staticmethod(leaky.leaky_attention)
    _written_out = staticmethod(leaky_reference.differentiable_leaky_attention)

    @property
    def parameters(self) -> tuple[int, ...]:
        return (self.att,)

    def _gradients(
        self,
        tensors: Sequence[Tensor | Rows],
        learning: Sequence[Tensor],
        order: Order,
        gradient: Tensor,
        learns: Sequence[bool],
    ) -> tuple[Tensor | None, ...]:
        # Of tensors that are coded only one is decoded as a whole at a time.
        sources, destinations = tensors[self.source], tensors[self.destination]
        att = learning[self.att].detach()[0].contiguous()
        of_score = torch.empty_like(gradient)
        of_destination, of_att = self._of_destinations(
            of_score, gradient, whole(sources).flatten(1), destinations, att, order
        )
        of_source = self._of_sources(of_score, sources, whole(destinations).flatten(1), att, order)
        return of_source, of_destination, of_att.unsqueeze(0)

    def _of_destinations(
        self,
        of_score: Tensor,
        gradient: Tensor,
        source: Tensor,
        destinations: Tensor | Rows,
        att: Tensor,
        order: Order,
    ) -> tuple[Tensor, Tensor]:
        """The gradients of the destinations and of att; fills ``of_score``."""
        of_destination = source.new_empty(destinations.shape)
        of_att, of_part = torch.zeros_like(att), torch.empty_like(att)
        positions = order.permutation
        if positions is None:  # what dropout drops depends on places among all edges
            kind, device = order.sources.dtype, order.sources.device
            positions = torch.arange(order.num_edges, dtype=kind, device=device)
        settings = self.slope, self.dropout, self._seed()
        for block in order.cuts.blocks_of_nodes(rows_at_a_time(destinations)):
            rows = rows_of(destinations, block.nodes).flatten(1).contiguous()
            edges = order.sources[block.edges], positions[block.edges]
            found = of_score, of_destination[block.nodes].flatten(1), of_part
            given = gradient, source, rows, att, *edges, starts_of(order.starts, block)
            leaky.leaky_attention_backward(*found, *given, *settings)
            of_att += of_part
        return of_destination, of_att

    def _of_sources(
        self,
        of_score: Tensor,
        sources: Tensor | Rows,
        destination: Tensor,
        att: Tensor,
        order: Order,
    ) -> Tensor:
        of_source, by_source = destination.new_empty(sources.shape), order.by_source
        of_source[order.num_sources :] = 0
        for block in by_source.cuts.blocks_of_nodes(rows_at_a_time(sources)):
            rows = rows_of(sources, block.nodes).flatten(1).contiguous()
            edges = by_source.destinations[block.edges], by_source.positions[block.edges]
            given = of_score, rows, destination, att, *edges
            leaky.leaky_attention_source(
                of_source[block.nodes].flatten(1),
                *given,
                starts_of(by_source.cuts.starts, block),
                self.slope,
            )
        return of_source

    def _matrices(self, read: Sequence[Tensor]) -> Sequence[Tensor | None]:
        source, destination, att = read
        return source.flatten(1), destination.flatten(1), att[0].contiguous()
