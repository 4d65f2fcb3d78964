"""Sums over edges on CUDA tensors: checks, allocations and kernel launches."""

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
    def args(self) -> tuple[int, int, int, int]:
        """The arguments of kernels."""
        return self.starts.data_ptr(), self.rows, self.edges, self.length


class SumKernels:
    """The operators on CUDA tensors, as methods with the signatures of the references.

    All work is queued on the current stream; nothing waits for the device. Kernels use no atomic
    additions, so results do not depend on the number of warps.

    Args:
        launch: A function that launches a kernel.
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
        """Sum rows; if ``weight`` is None, each weight is 1."""
        if not out.numel():
            return
        heads = 1 if weight is None else weight.size(1)
        width = x.size(1)
        columns = columns_of_lane(width // heads, heads, x, out)
        carry = x.new_empty((segments.count, width))
        weights = (
            (0, 0, 0, 0)
            if weight is None
            else (weight.data_ptr(), *places_args(weight_places, weight))
        )
        self._launch(
            kernel_of("sum", x.dtype, columns),
            *(x.device, segments.count * chunks(width // columns)),
            *(
                x.data_ptr(),
                *places_args(places, x),
                *weights,
                *segments.args,
                heads,
                width // heads,
            ),
            *(out.data_ptr(), carry.data_ptr()),
        )
        self._add_carries(out, carry, segments)

    def _add_carries(self, out: Tensor, carry: Tensor, segments: Segments) -> None:
        """Add the carries: the partial sums of rows in segments before their last one."""
        if segments.count > 1:
            outputs = out.data_ptr(), carry.data_ptr()
            warps = segments.count * chunks(carry.size(1))
            kernel = kernel_of("add_carries", out.dtype)
            self._launch(kernel, out.device, warps, *segments.args, carry.size(1), *outputs)

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
        self._launch(
            kernel_of("dots", x.dtype, columns),
            *(x.device, segments.count),
            *(
                of_sum.data_ptr(),
                x.data_ptr(),
                *places_args(places, x),
                *segments.args,
                heads,
                each,
            ),
            *(out.data_ptr(), *places_args(out_places, out)),
        )


def kernel_of(
    name: str,
    dtype: torch.dtype,
    columns: int | None = None,
    source: str = "cuda/weighted_sum.cu",
) -> Kernel:
    """Return the kernel of a name for a dtype and, if it has variants, for the columns per lane."""
    suffix = "" if columns is None else f"_{columns}"
    name = f"{name}_{str(dtype).removeprefix('torch.')}{suffix}"
    return Kernel(source, name)


def places_args(places: Tensor | None, x: Tensor) -> tuple[int, int, int]:
    """Return the arguments of kernels for places in the rows of x."""
    if places is None:
        return 0, 0, x.size(0)
    return places.data_ptr(), int(places.dtype == torch.int64), x.size(0)


def chunks(units: int) -> int:
    """Return the number of warps that share a row."""
    return -(-units // _LANES)


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
        if columns * size > _VECTOR or each % columns or not aligned:
            continue
        idle = _idle(each * heads // columns)
        if least is None or idle < least:
            best, least = columns, idle
    return best


def _idle(units: int) -> float:
    """Return the share of lanes without a unit."""
    beside = min(_LANES, 1 << (units - 1).bit_length())
    return 1 - units / (-(-units // beside) * beside)
