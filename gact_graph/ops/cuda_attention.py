"""Attention on CUDA tensors: checks, allocations and kernel launches."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from gact_graph.ops.cuda_sums import (
    Segments,
    SumKernels,
    chunks,
    columns_of_lane,
    kernel_of,
    places_args,
)
from gact_graph.ops.kernels.nvrtc import Kernel
from gact_graph.ops.reference.attention import check_attention, check_attention_backward
from gact_graph.ops.reference.dot_attention import (
    check_dot_attention,
    check_dot_attention_backward,
    check_drop_weights,
)
from gact_graph.ops.reference.leaky_attention import (
    check_leaky_attention,
    check_leaky_attention_backward,
    check_leaky_attention_source,
)
from gact_graph.ops.reference.softmax import GRAINS, dropped_of

_SOURCE = "cuda/attention.cu"
_LANES = 32


@dataclass(frozen=True)
class _Dropout:
    probability: float
    seed: int

    @property
    def args(self) -> tuple[int, float, int]:
        """The arguments of kernels: the threshold of 65536, the scale of kept weights, the seed."""
        dropped = dropped_of(self.probability)
        return dropped, GRAINS / (GRAINS - dropped), self.seed


_NONE = _Dropout(0.0, 0)


@dataclass(frozen=True)
class _Sums:
    """Scores that are LeakyReLU of the sum of the scores of source, destination and edge."""

    source: Tensor
    places: Tensor
    destination: Tensor
    terms: Tensor | None
    slope: float


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
        edges = places, weight_places, starts
        check_attention(out, source, destination, terms, *edges, dropout)
        segments = Segments(starts, places.numel())
        sums = _Sums(source, places, destination, terms, slope)
        self._sum_scores(out, weight_places, sums, segments)
        self._weigh(out, weight_places, segments, 1.0, _Dropout(dropout, seed))

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
        edges = places, weight_places, starts
        inputs = gradient, source, destination, terms, *edges, dropout
        check_attention_backward(of_score, of_destination, *inputs)
        segments = Segments(starts, places.numel())
        sums = _Sums(source, places, destination, terms, slope)
        self._sum_scores(of_score, weight_places, sums, segments)
        self._weigh(of_score, weight_places, segments, 1.0, _NONE)
        settings = 1.0, _Dropout(dropout, seed), sums
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
        rows, edges = (source, destination, att), (places, weight_places, starts)
        check_leaky_attention(out, *rows, *edges, dropout)
        segments = Segments(starts, places.numel())
        self._leaky_scores(out, *rows, places, weight_places, segments, slope)
        self._weigh(out, weight_places, segments, 1.0, _Dropout(dropout, seed))

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
        rows, edges = (source, destination, att), (places, weight_places, starts)
        outputs = of_score, of_destination, of_att
        check_leaky_attention_backward(*outputs, gradient, *rows, *edges, dropout)
        segments = Segments(starts, places.numel())
        self._leaky_scores(of_score, *rows, places, weight_places, segments, slope)
        self._weigh(of_score, weight_places, segments, 1.0, _NONE)
        settings = 1.0, _Dropout(dropout, seed)
        self._backward(of_score, of_score, gradient, weight_places, segments, *settings)
        inputs = of_score, weight_places, destination, source, places, att, slope, segments
        self._leaky_rows(of_destination, *inputs)
        self._leaky_vector(of_att, *inputs)

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
        rows, edges = (source, destination, att), (places, weight_places, starts)
        check_leaky_attention_source(of_source, of_score, *rows, *edges)
        segments = Segments(starts, places.numel())
        inputs = of_score, weight_places, source, destination, places, att, slope, segments
        self._leaky_rows(of_source, *inputs)

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
        check_dot_attention(out, source, destination, terms, places, weight_places, starts)
        segments = Segments(starts, places.numel())
        self._dots(out, weight_places, destination, source, places, segments)
        if terms is not None:
            # Places have no duplicates.
            rows = slice(None) if weight_places is None else weight_places.long()
            out[rows] += terms
        self._weigh(out, weight_places, segments, scale, _NONE)

    def dot_attention_backward(
        self,
        gradient: Tensor,
        weight: Tensor,
        places: Tensor | None,
        starts: Tensor,
        scale: float,
    ) -> None:
        edges = check_dot_attention_backward(gradient, weight, places, starts)
        segments = Segments(starts, edges)
        self._backward(gradient, weight, gradient, places, segments, scale, _NONE)

    def drop_weights(self, weight: Tensor, dropout: float, seed: int) -> None:
        check_drop_weights(weight, dropout)
        if weight.numel():
            warps = -(-weight.numel() // _LANES)
            args = weight.data_ptr(), weight.numel(), *_Dropout(dropout, seed).args
            self._launch(_kernel("drop", weight), weight.device, warps, *args)

    def _sum_scores(
        self, out: Tensor, out_places: Tensor | None, sums: _Sums, segments: Segments
    ) -> None:
        if not segments.edges or not out.numel():
            return
        self._launch(
            _kernel("sum_scores", out),
            *(out.device, segments.count),
            *(
                sums.source.data_ptr(),
                *places_args(sums.places, sums.source),
                sums.destination.data_ptr(),
            ),
            *(_address(sums.terms), float(sums.slope), *segments.args, out.size(1)),
            *(out.data_ptr(), *places_args(out_places, out)),
        )

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
        if not segments.edges or not out.numel():
            return
        heads, each = att.shape
        columns = columns_of_lane(each, 1, source, destination, att)
        self._launch(
            _kernel("leaky_scores", out, columns),
            *(out.device, segments.count),
            *(
                source.data_ptr(),
                *places_args(places, source),
                destination.data_ptr(),
                att.data_ptr(),
            ),
            *(
                float(slope),
                *segments.args,
                heads,
                each,
                out.data_ptr(),
                *places_args(out_places, out),
            ),
        )

    def _weigh(
        self,
        weight: Tensor,
        places: Tensor | None,
        segments: Segments,
        scale: float,
        dropout: _Dropout,
    ) -> None:
        """Replace scores by weights."""
        if not segments.edges or not weight.numel():
            return
        heads = weight.size(1)
        softmax = weight.new_empty((segments.rows, heads, 2))
        carry = weight.new_empty((segments.count, heads, 2))
        outputs = softmax.data_ptr(), carry.data_ptr()
        inputs = weight.data_ptr(), *places_args(places, weight), float(scale)
        edges, warps = (*segments.args, heads), segments.count * chunks(heads)
        device = weight.device
        self._launch(_kernel("softmax", weight), device, warps, *inputs, *edges, *outputs)
        if segments.count > 1:
            self._launch(_kernel("softmax_carries", weight), device, warps, *edges, *outputs)
        rest = softmax.data_ptr(), *dropout.args, *edges
        self._launch(_kernel("weigh", weight), device, segments.count, *inputs, *rest)

    def _backward(
        self,
        out: Tensor,
        weight: Tensor,
        gradient: Tensor,
        places: Tensor | None,
        segments: Segments,
        scale: float,
        dropout: _Dropout,
        sums: _Sums | None = None,
    ) -> None:
        """Write the gradients of scores; ``out`` may be ``weight`` or ``gradient``."""
        if not segments.edges or not out.numel():
            return
        heads, device = out.size(1), out.device
        mean, carry = out.new_empty((segments.rows, heads)), out.new_empty((segments.count, heads))
        edges, warps = (*segments.args, heads), segments.count * chunks(heads)
        inputs = weight.data_ptr(), gradient.data_ptr(), *places_args(places, out)
        outputs = mean.data_ptr(), carry.data_ptr()
        self._launch(_kernel("mean", out), device, warps, *inputs, *dropout.args, *edges, *outputs)
        self._add_carries(mean, carry, segments)
        leaky: tuple[int | float, ...] = (0, 0, 0, 0, 0, 0, 0.0)
        if sums is not None:
            of_source = sums.source.data_ptr(), *places_args(sums.places, sums.source)
            of_others = sums.destination.data_ptr(), _address(sums.terms)
            leaky = *of_source, *of_others, float(sums.slope)
        rest = mean.data_ptr(), float(scale), *dropout.args, *leaky, *edges
        kernel = _kernel("backward", out)
        self._launch(kernel, device, segments.count, out.data_ptr(), *inputs, *rest)

    def _leaky_rows(
        self,
        out: Tensor,
        of_score: Tensor,
        score_places: Tensor | None,
        rows: Tensor,
        others: Tensor,
        places: Tensor,
        att: Tensor,
        slope: float,
        segments: Segments,
    ) -> None:
        """Write the gradients of ``rows``, whose edges lead to ``others``."""
        if not out.numel():
            return
        heads, each = att.shape
        columns = columns_of_lane(each, heads, rows, others, out)
        carry = out.new_empty((segments.count, heads * each))
        self._launch(
            _kernel("leaky_rows", out, columns),
            *(out.device, segments.count * chunks(heads * each // columns)),
            *(of_score.data_ptr(), *places_args(score_places, of_score), rows.data_ptr()),
            *(others.data_ptr(), *places_args(places, others), att.data_ptr(), float(slope)),
            *(*segments.args, heads, each, out.data_ptr(), carry.data_ptr()),
        )
        self._add_carries(out, carry, segments)

    def _leaky_vector(
        self,
        out: Tensor,
        of_score: Tensor,
        score_places: Tensor | None,
        rows: Tensor,
        others: Tensor,
        places: Tensor,
        att: Tensor,
        slope: float,
        segments: Segments,
    ) -> None:
        """Write the gradient of ``att``, a sum over all edges."""
        if not segments.edges or not out.numel():
            out.zero_()
            return
        heads, each = att.shape
        columns = columns_of_lane(each, heads, rows, others)
        parts = out.new_empty((segments.count, heads, each))
        self._launch(
            _kernel("leaky_vector", out, columns),
            *(out.device, segments.count * chunks(heads * each // columns)),
            *(of_score.data_ptr(), *places_args(score_places, of_score), rows.data_ptr()),
            *(others.data_ptr(), *places_args(places, others), float(slope)),
            *(*segments.args, heads, each, parts.data_ptr()),
        )
        out.copy_(parts.sum(0))


def _address(x: Tensor | None) -> int:
    return 0 if x is None else x.data_ptr()


def _kernel(name: str, x: Tensor, columns: int | None = None) -> Kernel:
    return kernel_of(name, x.dtype, columns, _SOURCE)
