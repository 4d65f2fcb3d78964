"""``quantize`` by slice: codes of (x - mean) / deviation, for tensors that backward normalizes.

Batch norm brings each channel to variance 1, and layer norm each row, which scales the noise too:
noise relative to the largest channels would exceed channels that are a hundred times smaller. Here
noise is relative to each slice, and sums to zero in each. Normalized elements are spread over the
range of their group, where the minimum-variance decoding has half the noise of the plain one.
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from gact_graph.codecs.base import Encoded
from gact_graph.codecs.codec import Codec, Request
from gact_graph.codecs.group_widths import widths_of_groups
from gact_graph.codecs.quantize import Quantized, exceeds_float32
from gact_graph.codecs.reads import Values
from gact_graph.ops.batch_norm import restore_columns
from gact_graph.ops.quantize import DTYPES, Channels, decorrelated_weight, pack_channels

FEW = 8
"""The least elements of a slice: the statistics of smaller ones take more memory than codes."""


@dataclass(eq=False)
class QuantizedBySlice(Quantized):
    """The codes of a tensor whose slices were normalized, with the mean and deviation of each.

    Args:
        packed: The codes.
        bits: Bits per element.
        mean: The mean of each slice, float32, in the shape of the tensor with 1 for the dimensions
            of a slice.
        deviation: The standard deviation of each slice, bfloat16, in the same shape.
        shape: The shape of the tensor.
        dtype: The dtype of the tensor.
        weight: The weight of the minimum-variance decoding, float32, on the device that encoded.
        least_noise: Whether to decode with the least variance.
    """

    mean: Tensor
    deviation: Tensor
    shape: torch.Size
    dtype: torch.dtype
    weight: Tensor
    least_noise: bool = False
    parts: ClassVar[tuple[str, ...]] = ("mean", "deviation")

    @property
    def nbytes(self) -> int:
        return super().nbytes + self.weight.nbytes

    def decode(self) -> Tensor:
        packed = self.packed
        x = packed.unpack_min_variance(self.weight) if self.least_noise else packed.unpack()
        x = x.view(self.shape)
        # Normalized slices have mean 0, so gradients that backward passes on sum to 0 in each slice
        # and large means of earlier tensors cancel. So does the noise without its mean.
        deviation, count = self.deviation.float(), x.numel() // self.mean.numel()
        if len(self.mean) == 1 and count == len(x):  # columns
            statistics = torch.stack([self.mean.view(-1), deviation.view(-1)])
            restore_columns(x.view(count, -1), statistics)
            return narrowed(x.view(-1), self.dtype)
        shift = torch.addcmul(
            self.mean, x.sum_to_size(self.mean.shape), deviation, value=-1 / count
        )
        return narrowed(torch.addcmul(shift, x, deviation, out=x).view(-1), self.dtype)

    def min_variance(self) -> Encoded:
        return dataclasses.replace(self, least_noise=True)


def narrowed(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Convert decoded numbers in place, so that none of them becomes infinite."""
    most = torch.finfo(dtype).max
    if most < torch.finfo(x.dtype).max:
        x.clamp_(-most, most)
    return x.to(dtype)


class QuantizeBySlice(Codec):
    """Encodes floating-point tensors that backward normalizes slice by slice."""

    def encode(self, request: Request) -> QuantizedBySlice | None:
        x, reads = request.tensor, request.reads
        if not isinstance(reads, Values) or reads.slices is None or x.dtype not in DTYPES:
            return None
        bits = max(request.bits, reads.least_bits)
        if bits >= min(32, 8 * x.element_size()) or not x.numel():
            return None
        shape, dims = reads.slices
        if x.numel() != math.prod(shape) or math.prod(shape[d] for d in dims) < FEW:
            return None
        if exceeds_float32(x, reads.slices):
            return None
        rows = x.view(shape)
        mean, deviation, channels = statistics_of(rows, dims)
        size = request.group_size
        widths = widths_of_groups(rows, bits, size, request.row_weights, channels=channels)
        packed = pack_channels(
            rows, channels, int(bits), group_size=size, seed=request.seed, widths=widths
        )
        if packed is None:
            return None  # a slice with NaN or Inf has no statistics, and would decode to NaN
        bits = packed.bits if widths is None else bits
        weight = decorrelated_weight(rows, packed, channels)
        return QuantizedBySlice(packed, bits, mean, deviation, rows.shape, x.dtype, weight)


def statistics_of(x: Tensor, dims: tuple[int, ...]) -> tuple[Tensor, Tensor, Channels]:
    """Return the mean and deviation of each slice, and the channels to divide them out.

    Args:
        x: A tensor of float16, bfloat16, float32 or float64, not empty.
        dims: The dimensions that a slice spans.

    Returns:
        The mean, float32, and the standard deviation, bfloat16, both in the shape of ``x`` with 1
        for the dimensions of a slice; and the channels for
        :func:`~gact_graph.ops.quantize.pack_channels`.
    """
    mean, deviation = _statistics(x, dims)
    # A slice of equal elements has deviation 0 and decodes to its mean. Where the variance is more
    # than a float32 holds, pack_channels is to find NaN and to refuse.
    divisor = deviation.masked_fill(deviation == 0, 1).masked_fill_(deviation.isinf(), math.nan)
    # By channel: all dimensions from the first to the last that a slice does not span.
    others = [d for d in range(x.dim()) if d not in dims] or [0]
    first, end = others[0], others[-1] + 1
    spread = [n if first <= d < end else 1 for d, n in enumerate(x.shape)]
    statistics = [t.float().expand(spread).reshape(-1) for t in (mean, divisor)]
    return mean, deviation, Channels(torch.stack(statistics), math.prod(x.shape[end:]))


def _statistics(x: Tensor, dims: tuple[int, ...]) -> tuple[Tensor, Tensor]:
    of_columns = dims[0] == 0 and all(x.size(d) == 1 for d in dims[1:])
    if of_columns and x.dtype != torch.float64:
        # On a CPU, ten times as fast as on all dimensions. On CUDA, var_mean() would allocate three
        # times the bytes of x.
        rows = x.view(len(x), -1)
        mean, variance = torch.batch_norm_update_stats(rows.float(), None, None, 0.0)
        mean, variance = mean.view(x[:1].shape), variance.view(x[:1].shape)
    else:
        # The variance of float16 may be more than it holds, and the mean is not to be rounded.
        x = x.float() if x.element_size() < 4 else x
        variance, mean = torch.var_mean(x, dims, correction=0, keepdim=True)
    return mean.float(), variance.sqrt().bfloat16()
