"""``quantize`` by slice: codes of (x - mean) / deviation, as normalisation reads a context.

Batch norm brings each channel to variance 1, layer norm each row. It multiplies noise by as much:
relative to the largest channels, noise would drown those that are a hundred times smaller. Here it
is relative to each slice, and sums to zero in each. What is normalised lies all over the range of
its group, where the mean of both readings has half the noise of one.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from gact_graph.codecs.base import Codec, Encoded, Request
from gact_graph.codecs.reads import Values
from gact_graph.ops.quantize import DTYPES, Packed, pack

_FEW = 8
"""Elements of a slice below which its statistics take more room than its codes."""


class QuantizedBySlice(Encoded):
    """The codes of a tensor whose slices were brought to variance 1, and their scales.

    Args:
        packed: The codes.
        mean: Of each slice, float32, in the context's shape with 1 for what is in one slice.
        deviation: The same, bfloat16.
        shape: Of the context.
        dtype: Of the context.
        share: Of the second reading, in the mean that :meth:`alone` decodes; float32, on the device
            where the codes were made.
        both: Whether that mean is decoded.
    """

    codec = "quantize"

    def __init__(
        self,
        packed: Packed,
        mean: Tensor,
        deviation: Tensor,
        shape: torch.Size,
        dtype: torch.dtype,
        share: Tensor,
        both: bool = False,
    ) -> None:
        self.packed = packed
        self.mean = mean
        self.deviation = deviation
        self.shape = shape
        self.dtype = dtype
        self.bits = packed.bits
        self._share = share
        self._both = both

    @property
    def nbytes(self) -> int:
        parts = self.mean, self.deviation, self._share
        return self.packed.nbytes + sum(part.nbytes for part in parts)

    def decode(self) -> Tensor:
        packed = self.packed
        x = (packed.unpack_both(self._share) if self._both else packed.unpack()).view(self.shape)
        # What is normalised has a mean of 0. So backward hands on gradients that sum to 0 in each
        # slice, and the means of what comes before, however large, cancel. So does their noise.
        x -= x.sum_to_size(self.mean.shape) / (x.numel() // self.mean.numel())
        return torch.addcmul(self.mean, x, self.deviation.float(), out=x).view(-1).to(self.dtype)

    def reread(self) -> Encoded:
        return self._with(self.packed.reread(), self.mean, self.deviation)

    def alone(self) -> Encoded:
        return self._with(self.packed, self.mean, self.deviation, both=True)

    def movable(self) -> tuple[Tensor, ...]:
        return *self.packed.tensors, self.mean, self.deviation

    def moved(self, *tensors: Tensor) -> QuantizedBySlice:
        *packed, mean, deviation = tensors
        return self._with(self.packed.moved(*packed), mean, deviation)

    def _with(
        self, packed: Packed, mean: Tensor, deviation: Tensor, both: bool = False
    ) -> QuantizedBySlice:
        shape, dtype, share = self.shape, self.dtype, self._share
        return QuantizedBySlice(packed, mean, deviation, shape, dtype, share, both)


class QuantizeBySlice(Codec):
    """Takes floating-point tensors that backward normalises slice by slice."""

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
        # A slice of equal elements has a deviation of 0, and comes back as its mean.
        deviation = _root_mean_square(centered, dims).bfloat16()
        scaled = centered.div_(deviation.masked_fill(deviation == 0, 1))
        packed = pack(scaled, bits, group_size=request.group_size, seed=request.seed)
        share = packed.share_of_second(scaled)
        return QuantizedBySlice(packed, mean, deviation, rows.shape, x.dtype, share)


def _root_mean_square(x: Tensor, dims: tuple[int, ...]) -> Tensor:
    """Of each slice of mean 0, in the shape of ``x`` with 1 for what is in one slice."""
    of_columns = dims[0] == 0 and all(x.size(d) == 1 for d in dims[1:])
    if of_columns and x.device.type == "cpu":
        # Ten times as fast as the norm there.
        _, variance = torch.batch_norm_update_stats(x.view(len(x), -1), None, None, 0.0)
        return variance.sqrt_().view(x[:1].shape)
    count = math.prod(x.size(d) for d in dims)
    return torch.linalg.vector_norm(x, dim=dims, keepdim=True).div_(math.sqrt(count))
