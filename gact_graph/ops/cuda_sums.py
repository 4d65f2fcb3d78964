"""Sums over edges on CUDA tensors: what is checked, allocated and handed to the kernels."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from gact_graph.ops.cuda import Launch
from gact_graph.ops.kernels.nvrtc import Kernel
from gact_graph.ops.reference.attention import check_segment_sum
from gact_graph.ops.reference.weighted_sum import check_backward, check_sum, check_weights

_LANES = 32
_VECTOR = 16  # bytes that a lane loads at a time, at most

# Edges and ends of rows a segment at least, and segments at most: each may leave a row of carries,
# which are to be few beside the rows themselves.
_SEGMENT = 256
_MOST_SEGMENTS = 1 << 15


@dataclass(frozen=True)
class Segments:
    """How the edges of rows are shared out: by their numbers alone, whatever the device."""

    starts: Tensor
    edges: int

    @property
    def rows(self) -> int:
        return self.starts.numel() - 1

    @property
    def length(self) -> int:
        """Edges and ends of rows in each."""
        return max(_SEGMENT, -(-(self.rows + self.edges) // _MOST_SEGMENTS))

    @property
    def count(self) -> int:
        return -(-(self.rows + self.edges) // self.length)

    @property
    def args(self) -> tuple[int, int, int, int]:
        """As kernels take them."""
        return self.starts.data_ptr(), self.rows, self.edges, self.length


class SumKernels:
    """The compiled kernels, with the signatures of the operators.

    Everything is queued on the current stream; nothing waits for the device. Results do not depend
    on how many warps run: none is added by an atomic operation.

    Args:
        launch: Starts a kernel.
    """

    def __init__(self, launch: Launch) -> None:
        self._launch = launch

    def weighted_sum(
        self,
        out: Tensor,
        x: Tensor,
        places: Tensor | None,
        weight: Tensor,
        weight_places: Tensor | None,
        starts: Tensor,
    ) -> None:
        edges = check_sum(out, x, places, weight, weight_places, starts)
        self._sum(out, x, places, weight, weight_places, Segments(starts, edges))

    def weighted_sum_weights(
        self, gradient: Tensor, x: Tensor, places: Tensor | None, starts: Tensor, heads: int
    ) -> Tensor:
        edges = check_weights(gradient, x, places, starts, heads)
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
        edges = check_backward(of_x, of_weight, gradient, x, places, weight, weight_places, starts)
        segments = Segments(starts, edges)
        self._sum(of_x, gradient, places, weight, weight_places, segments)
        self._dots(of_weight, weight_places, x, gradient, places, segments)

    def segment_sum(self, out: Tensor, x: Tensor, places: Tensor, starts: Tensor) -> None:
        check_segment_sum(out, x, places, starts)
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
        """The sums of rows; with ``weight`` None each weight is 1."""
        if not out.numel():
            return
        heads = 1 if weight is None else weight.size(1)
        width = x.size(1)
        columns = columns_of_lane(width // heads, heads, x, out)
        carry = x.new_empty((segments.count, width))
        weights = (
            (0, 0, 0, 0) if weight is None else (weight.data_ptr(), *at(weight_places, weight))
        )
        self._launch(
            kernel_of("sum", x.dtype, columns),
            *(x.device, segments.count * chunks(width // columns)),
            *(x.data_ptr(), *at(places, x), *weights, *segments.args, heads, width // heads),
            *(out.data_ptr(), carry.data_ptr()),
        )
        self._add_carries(out, carry, segments)

    def _add_carries(self, out: Tensor, carry: Tensor, segments: Segments) -> None:
        """The second kernel of a sum: of what rows left in segments that they do not end in."""
        if segments.count > 1:
            ends = out.data_ptr(), carry.data_ptr()
            warps = segments.count * chunks(carry.size(1))
            kernel = kernel_of("add_carries", out.dtype)
            self._launch(kernel, out.device, warps, *segments.args, carry.size(1), *ends)

    def _dots(
        self,
        out: Tensor,
        out_places: Tensor | None,
        of_sum: Tensor,
        x: Tensor,
        places: Tensor | None,
        segments: Segments,
    ) -> None:
        """The dot products of both rows of each edge, for each head, at their places in ``out``."""
        if not segments.edges:
            return
        heads = out.size(1)
        if not x.size(1):
            out[slice(None) if out_places is None else out_places.long()] = 0
            return
        each = x.size(1) // heads
        columns = columns_of_lane(each, 1, of_sum, x)
        self._launch(
            kernel_of("dots", x.dtype, columns),
            *(x.device, segments.count),
            *(of_sum.data_ptr(), x.data_ptr(), *at(places, x), *segments.args, heads, each),
            *(out.data_ptr(), *at(out_places, out)),
        )


def kernel_of(
    name: str,
    dtype: torch.dtype,
    columns: int | None = None,
    source: str = "cuda/weighted_sum.cu",
) -> Kernel:
    """The kernel of a name for a dtype and, where there are several, columns of a lane."""
    suffix = "" if columns is None else f"_{columns}"
    name = f"{name}_{str(dtype).removeprefix('torch.')}{suffix}"
    return Kernel(source, name)


def at(places: Tensor | None, of: Tensor) -> tuple[int, int, int]:
    """Places in the rows of a tensor, as kernels take them."""
    if places is None:
        return 0, 0, of.size(0)
    return places.data_ptr(), int(places.dtype == torch.int64), of.size(0)


def chunks(units: int) -> int:
    """How many warps share a row of so many units."""
    return -(-units // _LANES)


def columns_of_lane(each: int, heads: int, *tensors: Tensor) -> int:
    """How many neighbouring columns a lane holds: what leaves fewest lanes idle, and then the most.

    Args:
        each: Columns of a head, of which a lane must not hold those of two.
        heads: How many lie side by side in what lanes share.
        tensors: Those that are read and written by so many columns at a time.
    """
    size = tensors[0].element_size()
    found, least = 1, None
    for columns in (4, 2, 1):
        aligned = all(t.data_ptr() % (columns * size) == 0 for t in tensors)
        if columns * size > _VECTOR or each % columns or not aligned:
            continue
        idle = _idle(each * heads // columns)
        if least is None or idle < least:
            found, least = columns, idle
    return found


def _idle(units: int) -> float:
    """The share of lanes without a unit."""
    beside = min(_LANES, 1 << (units - 1).bit_length())
    return 1 - units / (-(-units // beside) * beside)
