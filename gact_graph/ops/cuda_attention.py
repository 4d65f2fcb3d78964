"""Attention on CUDA tensors: allocations and kernel launches."""

from __future__ import annotations

from typing import Any, NamedTuple

from torch import Tensor

from gact_graph.ops.cuda import LANES
from gact_graph.ops.cuda_sums import Index, Segments, SumKernels, chunks, columns_of_lane, index
from gact_graph.ops.reference.edges import GRAINS, dropped_of


def _dropout(probability: float, seed: int) -> tuple[int, float, int]:
    """Return the arguments of kernels: the threshold, the scale of kept weights and the seed."""
    dropped = dropped_of(probability)
    return dropped, GRAINS / (GRAINS - dropped), seed


_NO_DROPOUT = _dropout(0.0, 0)


class _LeakyEdges(NamedTuple):
    """Arguments of the kernels for the gradients of ``rows``, whose edges lead to ``others``."""

    of_score: Tensor
    score_index: Index
    rows: Tensor
    others: Tensor
    other_index: Index


class EdgeKernels(SumKernels):
    """The operators for sums and attention on CUDA tensors.

    Between kernels, attention stores numbers for each row and head, none for each edge.
    """

    def attention(
        self,
        out: Tensor,
        source: Tensor,
        destination: Tensor,
        terms: Tensor | None,
        places: Tensor,
        weight_places: Tensor | None,
        starts: Tensor,
        slope: float,
        dropout: float,
        seed: int,
    ) -> None:
        segments = Segments(starts, places.numel())
        terms_of_scores = source, index(places, source), destination, terms, float(slope)
        self._sum_scores(out, weight_places, terms_of_scores, segments)
        self._weigh(out, weight_places, segments, 1.0, _dropout(dropout, seed))

    def attention_backward(
        self,
        of_score: Tensor,
        of_destination: Tensor,
        gradient: Tensor,
        source: Tensor,
        destination: Tensor,
        terms: Tensor | None,
        places: Tensor,
        weight_places: Tensor | None,
        starts: Tensor,
        slope: float,
        dropout: float,
        seed: int,
    ) -> None:
        segments = Segments(starts, places.numel())
        terms_of_scores = source, index(places, source), destination, terms, float(slope)
        self._sum_scores(of_score, weight_places, terms_of_scores, segments)
        self._weigh(of_score, weight_places, segments, 1.0, _NO_DROPOUT)
        settings = 1.0, _dropout(dropout, seed), terms_of_scores
        self._backward(of_score, of_score, gradient, weight_places, segments, *settings)
        self._sum(of_destination, of_score, weight_places, None, None, segments)

    def leaky_attention(
        self,
        out: Tensor,
        source: Tensor,
        destination: Tensor,
        att: Tensor,
        places: Tensor,
        weight_places: Tensor | None,
        starts: Tensor,
        slope: float,
        dropout: float,
        seed: int,
    ) -> None:
        segments = Segments(starts, places.numel())
        self._leaky_scores(out, source, destination, att, places, weight_places, segments, slope)
        self._weigh(out, weight_places, segments, 1.0, _dropout(dropout, seed))

    def leaky_attention_backward(
        self,
        of_score: Tensor,
        of_destination: Tensor,
        of_att: Tensor,
        gradient: Tensor,
        source: Tensor,
        destination: Tensor,
        att: Tensor,
        places: Tensor,
        weight_places: Tensor | None,
        starts: Tensor,
        slope: float,
        dropout: float,
        seed: int,
    ) -> None:
        segments, rows = Segments(starts, places.numel()), (source, destination, att)
        self._leaky_scores(of_score, *rows, places, weight_places, segments, slope)
        self._weigh(of_score, weight_places, segments, 1.0, _NO_DROPOUT)
        settings = 1.0, _dropout(dropout, seed)
        self._backward(of_score, of_score, gradient, weight_places, segments, *settings)
        of_edges = of_score, index(weight_places, of_score)
        edges = _LeakyEdges(*of_edges, destination, source, index(places, source))
        self._leaky_rows(of_destination, edges, att, slope, segments)
        self._leaky_vector(of_att, edges, slope, segments)

    def leaky_attention_source(
        self,
        of_source: Tensor,
        of_score: Tensor,
        source: Tensor,
        destination: Tensor,
        att: Tensor,
        places: Tensor,
        weight_places: Tensor,
        starts: Tensor,
        slope: float,
    ) -> None:
        of_edges = of_score, index(weight_places, of_score)
        edges = _LeakyEdges(*of_edges, source, destination, index(places, destination))
        self._leaky_rows(of_source, edges, att, slope, Segments(starts, places.numel()))

    def dot_attention(
        self,
        out: Tensor,
        source: Tensor,
        destination: Tensor,
        terms: Tensor | None,
        places: Tensor,
        weight_places: Tensor | None,
        starts: Tensor,
        scale: float,
    ) -> None:
        segments = Segments(starts, places.numel())
        self._dots(out, weight_places, destination, source, places, segments)
        if terms is not None:
            # Places have no duplicates.
            rows = slice(None) if weight_places is None else weight_places.long()
            out[rows] += terms
        self._weigh(out, weight_places, segments, scale, _NO_DROPOUT)

    def dot_attention_backward(
        self,
        gradient: Tensor,
        weight: Tensor,
        places: Tensor | None,
        starts: Tensor,
        scale: float,
    ) -> None:
        segments = Segments(starts, len(gradient) if places is None else places.numel())
        self._backward(gradient, weight, gradient, places, segments, scale, _NO_DROPOUT)

    def drop_weights(self, weight: Tensor, dropout: float, seed: int) -> None:
        if weight.numel():
            warps, settings = -(-weight.numel() // LANES), _dropout(dropout, seed)
            self._run_on_edges("drop", weight, warps, weight, weight.numel(), settings)

    def _sum_scores(
        self,
        out: Tensor,
        out_places: Tensor | None,
        terms: tuple[Any, ...],
        segments: Segments,
    ) -> None:
        if segments.edges and out.numel():
            args = terms, segments.args, out.size(1), out, index(out_places, out)
            self._run_on_edges("sum_scores", out, segments.count, *args)

    def _leaky_scores(
        self,
        out: Tensor,
        source: Tensor,
        destination: Tensor,
        att: Tensor,
        places: Tensor,
        out_places: Tensor | None,
        segments: Segments,
        slope: float,
    ) -> None:
        if segments.edges and out.numel():
            columns = columns_of_lane(att.size(1), 1, source, destination, att)
            inputs = source, index(places, source), destination, att, float(slope)
            args = inputs, segments.args, tuple(att.shape), out, index(out_places, out)
            self._run_on_edges("leaky_scores", out, segments.count, *args, columns=columns)

    def _weigh(
        self,
        weight: Tensor,
        places: Tensor | None,
        segments: Segments,
        scale: float,
        dropout: tuple[int, float, int],
    ) -> None:
        """Replace scores by weights."""
        if not segments.edges or not weight.numel():
            return
        heads = weight.size(1)
        softmax = weight.new_empty((segments.rows, heads, 2))
        carry = weight.new_empty((segments.count, heads, 2))
        inputs = weight, index(places, weight), float(scale)
        edges, warps = (segments.args, heads), segments.count * chunks(heads)
        self._run_on_edges("softmax", weight, warps, inputs, edges, softmax, carry)
        if segments.count > 1:
            self._run_on_edges("softmax_carries", weight, warps, edges, softmax, carry)
        self._run_on_edges("weigh", weight, segments.count, inputs, softmax, dropout, edges)

    def _backward(
        self,
        out: Tensor,
        weight: Tensor,
        gradient: Tensor,
        places: Tensor | None,
        segments: Segments,
        scale: float,
        dropout: tuple[int, float, int],
        terms: tuple[Any, ...] = (0, 0, 0, 0, 0, 0, 0.0),
    ) -> None:
        """Write the gradients of scores; ``out`` may be ``weight`` or ``gradient``.

        Args:
            terms: As for :meth:`_sum_scores`, if scores are LeakyReLU of the sums of these terms.
        """
        if not segments.edges or not out.numel():
            return
        heads = out.size(1)
        mean, carry = out.new_empty((segments.rows, heads)), out.new_empty((segments.count, heads))
        edges, warps = (segments.args, heads), segments.count * chunks(heads)
        inputs = weight, gradient, index(places, out)
        self._run_on_edges("mean", out, warps, inputs, dropout, edges, mean, carry)
        self._add_carries(mean, carry, segments)
        args = out, inputs, mean, float(scale), dropout, terms, edges
        self._run_on_edges("backward", out, segments.count, *args)

    def _leaky_rows(
        self, out: Tensor, edges: _LeakyEdges, att: Tensor, slope: float, segments: Segments
    ) -> None:
        """Write the gradients of ``edges.rows``."""
        if not out.numel():
            return
        heads, each = att.shape
        columns = columns_of_lane(each, heads, edges.rows, edges.others, out)
        carry = out.new_empty((segments.count, heads * each))
        args = edges, att, float(slope), segments.args, heads, each, out, carry
        warps = segments.count * chunks(heads * each // columns)
        self._run_on_edges("leaky_rows", out, warps, *args, columns=columns)
        self._add_carries(out, carry, segments)

    def _leaky_vector(
        self, out: Tensor, edges: _LeakyEdges, slope: float, segments: Segments
    ) -> None:
        """Write the gradient of ``att``, a sum over all edges."""
        if not segments.edges or not out.numel():
            out.zero_()
            return
        heads, each = out.shape
        columns = columns_of_lane(each, heads, edges.rows, edges.others)
        parts = out.new_empty((segments.count, heads, each))
        args = edges, float(slope), segments.args, heads, each, parts
        warps = segments.count * chunks(heads * each // columns)
        self._run_on_edges("leaky_vector", out, warps, *args, columns=columns)
        out.copy_(parts.sum(0))
