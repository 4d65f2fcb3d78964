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

import torch
from torch import Tensor

from gact_graph.codecs.base import Encoded
from gact_graph.codecs.codec import Codec, Request
from gact_graph.codecs.quantize import Quantized, packed_of
from gact_graph.codecs.reads import Values
from gact_graph.ops.quantize import DTYPES

_FEW = 8
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
    parts = ("mean", "deviation")

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
        shift = torch.addcmul(
            self.mean, x.sum_to_size(self.mean.shape), deviation, value=-1 / count
        )
        return torch.addcmul(shift, x, deviation, out=x).view(-1).to(self.dtype)

    def min_variance(self) -> Encoded:
        return dataclasses.replace(self, least_noise=True)


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
        if x.numel() != math.prod(shape) or math.prod(shape[d] for d in dims) < _FEW:
            return None
        rows = x.view(shape).float()
        mean = rows.sum(dims, keepdim=True) / math.prod(shape[d] for d in dims)
        centered = rows - mean
        # A slice of equal elements has deviation 0 and decodes to its mean.
        deviation = _root_mean_square(centered, dims).bfloat16()
        scaled = centered.div_(deviation.masked_fill(deviation == 0, 1))
        packed, bits = packed_of(scaled, bits, request)
        if packed.groups is not None:
            return None  # a slice with NaN or Inf has no statistics, and would decode to NaN
        weight = packed.min_variance_weight(scaled)
        return QuantizedBySlice(packed, bits, mean, deviation, rows.shape, x.dtype, weight)


def _root_mean_square(x: Tensor, dims: tuple[int, ...]) -> Tensor:
    """Return the root mean square of each slice of mean 0, keeping dimensions."""
    of_columns = dims[0] == 0 and all(x.size(d) == 1 for d in dims[1:])
    if of_columns and x.device.type == "cpu":
        # Ten times as fast as the norm on the CPU.
        _, variance = torch.batch_norm_update_stats(x.view(len(x), -1), None, None, 0.0)
        return variance.sqrt_().view(x[:1].shape)
    count = math.prod(x.size(d) for d in dims)
    return torch.linalg.vector_norm(x, dim=dims, keepdim=True).div_(math.sqrt(count))
