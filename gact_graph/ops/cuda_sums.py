"""Sums over edges on CUDA tensors: allocations and kernel launches."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from gact_graph.ops.checks import name_of
from gact_graph.ops.cuda import LANES, VECTOR, Launcher
from gact_graph.ops.kernels.nvrtc import Kernel

# The kernels of weighted_sum.cu; attention.cu has the others that depend on columns.
_SUMS = ("sum", "add_carries", "dots")

_MOST_SPANS = 4
"""The most vectors of a row that a lane holds."""

# The least number of edges and row ends in a segment, and the most segments. Each segment may write
# a row of carries, and these must be few beside the rows themselves.
_SEGMENT = 256
_MOST_SEGMENTS = 1 << 15


@dataclass(frozen=True)
class Segments:
    """The partition of edges into segments: a function of their number, not of the device."""

    starts: Tensor
    edges: int

    @property
    def rows(self) -> int:
        return self.starts.numel() - 1

    @property
    def length(self) -> int:
        """The number of edges and row ends in each segment."""
        return max(_SEGMENT, -(-(self.rows + self.edges) // _MOST_SEGMENTS))

    @property
    def count(self) -> int:
        return -(-(self.rows + self.edges) // self.length)

    @property
    def args(self) -> tuple[Tensor, int, int, int]:
        """The arguments of kernels."""
        return self.starts, self.rows, self.edges, self.length


class SumKernels(Launcher):
    """The sums, as methods with the signatures of the references.

    Kernels use no atomic additions, so results do not depend on the number of warps.
    """

    def weighted_sum(
        self,
        out: Tensor,
        x: Tensor,
        places: Tensor | None,
        weight: Tensor,
        weight_places: Tensor | None,
        starts: Tensor,
    ) -> None:
        edges = len(x) if places is None else places.numel()
        self._sum(out, x, places, weight, weight_places, Segments(starts, edges))

    def weighted_sum_weights(
        self, gradient: Tensor, x: Tensor, places: Tensor | None, starts: Tensor, heads: int
    ) -> Tensor:
        edges = len(x) if places is None else places.numel()
        out = x.new_empty((edges, heads))
        self._dots(out, None, gradient, x, places, Segments(starts, edges))
        return out

    def weighted_sum_backward(
        self,
        of_x: Tensor,
        of_weight: Tensor,
        gradient: Tensor,
        x: Tensor,
        places: Tensor,
        weight: Tensor,
        weight_places: Tensor,
        starts: Tensor,
    ) -> None:
        segments, heads = Segments(starts, places.numel()), weight.size(1)
        spans = spans_of_lane(heads, gradient, weight, x, of_x)
        if not of_x.numel():  # no rows, or rows without columns
            self._dots(of_weight, weight_places, x, gradient, places, segments)
            return
        if spans is not None and holds_heads(x, heads, spans):
            sums = of_x, gradient, places, weight, weight_places, segments
            self._sum_wide("wide_backward", spans, *sums, x, of_weight)
        else:
            self._sum(of_x, gradient, places, weight, weight_places, segments)
            self._dots(of_weight, weight_places, x, gradient, places, segments)

    def segment_sum(self, out: Tensor, x: Tensor, places: Tensor, starts: Tensor) -> None:
        self._sum(out, x, places, None, None, Segments(starts, places.numel()))

    def _sum(
        self,
        out: Tensor,
        x: Tensor,
        places: Tensor | None,
        weight: Tensor | None,
        weight_places: Tensor | None,
        segments: Segments,
    ) -> None:
        """Sum rows; if ``weight`` is None, each weight is 1."""
        if not out.numel():
            return
        heads, width = 1 if weight is None else weight.size(1), x.size(1)
        spans = None if weight is None else spans_of_lane(heads, x, weight, out)
        if weight is not None and spans is not None:
            self._sum_wide("wide_sum", spans, out, x, places, weight, weight_places, segments)
            return
        columns = columns_of_lane(width // heads, heads, x, out)
        carry = x.new_empty((segments.count, width))
        weights = (weight, 0, 0, 0) if weight is None else (weight, index(weight_places, weight))
        warps = segments.count * chunks(width // columns)
        rows = x, index(places, x), weights
        args = *rows, segments.args, heads, width // heads, out, carry
        self._run_on_edges("sum", x, warps, *args, columns=columns)
        self._add_carries(out, carry, segments)

    def _sum_wide(
        self,
        name: str,
        spans: int,
        out: Tensor,
        x: Tensor,
        places: Tensor | None,
        weight: Tensor,
        weight_places: Tensor | None,
        segments: Segments,
        *gradients: Tensor,
    ) -> None:
        """Sum rows, ``spans`` vectors a lane; with ``gradients`` (the rows whose products with
        those of x are the gradient of the weights, and that gradient) do both."""
        width, heads = x.size(1), weight.size(1)
        carry = x.new_empty((segments.count, width))
        warps = segments.count * chunks(width * x.element_size() // VECTOR, spans)
        rows = x, index(places, x), weight, index(weight_places, weight)
        args = *rows, segments.args, heads, width // heads, out, carry, *gradients
        kernel = Kernel("cuda/wide_sum.cu", f"{name}_{name_of(x.dtype)}", spans)
        self._launch(kernel, x.device, warps, *args)
        self._add_carries(out, carry, segments)

    def _add_carries(self, out: Tensor, carry: Tensor, segments: Segments) -> None:
        """Add the carries: the partial sums of rows in segments before their last one."""
        if segments.count > 1:
            width = carry.size(1)
            warps = segments.count * chunks(width)
            self._run_on_edges("add_carries", out, warps, segments.args, width, out, carry)

    def _dots(
        self,
        out: Tensor,
        out_places: Tensor | None,
        of_sum: Tensor,
        x: Tensor,
        places: Tensor | None,
        segments: Segments,
    ) -> None:
        """Write the dot product of both rows of each edge, for each head, to its row of ``out``."""
        if not segments.edges:
            return
        heads = out.size(1)
        if not x.size(1):
            out[slice(None) if out_places is None else out_places.long()] = 0
            return
        each = x.size(1) // heads
        columns = columns_of_lane(each, 1, of_sum, x)
        args = of_sum, x, index(places, x), segments.args, heads, each, out, index(out_places, out)
        self._run_on_edges("dots", x, segments.count, *args, columns=columns)

    def _run_on_edges(
        self, name: str, x: Tensor, warps: int, *args: Any, columns: int | None = None
    ) -> None:
        """Launch the kernel for a tensor's dtype and, if it has variants, the columns per lane."""
        suffix = "" if columns is None else f"_{columns}"
        source = "cuda/weighted_sum.cu" if name in _SUMS else "cuda/attention.cu"
        kernel = Kernel(source, f"{name}_{name_of(x.dtype)}{suffix}")
        self._launch(kernel, x.device, warps, *args)


Index = tuple[Tensor | None, int, int]
"""The arguments of kernels for an index: the places, whether they have 64 bits, and their limit."""


def index(places: Tensor | None, x: Tensor) -> Index:
    """Return the arguments of kernels for places in the rows of x."""
    return places, int(places is not None and places.dtype == torch.int64), len(x)


def chunks(units: int, each: int = 1) -> int:
    """Return the number of warps that share a row, each lane of which holds ``each`` units."""
    return -(-units // (LANES * each))


def spans_of_lane(heads: int, x: Tensor, weight: Tensor, *tensors: Tensor) -> int | None:
    """Return how many vectors of 16 bytes a lane holds of a row; None if half of the lanes do.

    Args:
        heads: Heads that share the columns of x. A vector has columns of one head only.
        x: The rows.
        weight: The weights, of which a warp counts fewer than 2^32, like rows.
        tensors: Other tensors with rows that wide.
    """
    columns, width = VECTOR // x.element_size(), x.size(1)
    aligned = all(t.data_ptr() % VECTOR == 0 for t in (x, *tensors))
    if 2 * width <= columns * LANES or width // heads % columns or not aligned:
        return None
    if max(len(x), len(weight)) >= 1 << 32:
        return None
    return min(_MOST_SPANS, chunks(width // columns))


def holds_heads(x: Tensor, heads: int, spans: int) -> bool:
    """Return whether the lanes of a warp can add up the products of each head: one vector of
    adjacent lanes has the columns of a head, or it is the only head."""
    lanes = x.size(1) // heads * x.element_size() // VECTOR
    if heads == 1:
        return lanes <= LANES * spans
    return lanes * heads <= LANES or LANES % lanes == 0


def columns_of_lane(each: int, heads: int, *tensors: Tensor) -> int:
    """Return the adjacent columns per lane: the most of those that leave the fewest lanes idle.

    Args:
        each: Columns per head. A lane holds columns of one head only.
        heads: Heads that share the lanes.
        tensors: The tensors that are read or written by so many columns at a time.
    """
    size = tensors[0].element_size()
    best, least = 1, None
    for columns in (4, 2, 1):
        aligned = all(t.data_ptr() % (columns * size) == 0 for t in tensors)
        if columns * size > VECTOR or each % columns or not aligned:
            continue
        idle = _idle(each * heads // columns)
        if least is None or idle < least:
            best, least = columns, idle
    return best


def _idle(units: int) -> float:
    """Return the share of lanes without a unit; 0 if there are no units."""
    if not units:
        return 0.0
    beside = min(LANES, 1 << (units - 1).bit_length())
    return 1 - units / (-(-units // beside) * beside)
