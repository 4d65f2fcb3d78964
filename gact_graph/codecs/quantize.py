"""``quantize``: a code of b bits for each element, by unbiased rounding."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from gact_graph.codecs.base import Encoded, Movable
from gact_graph.codecs.codec import Codec, Request
from gact_graph.codecs.group_widths import widths_of_groups
from gact_graph.codecs.reads import Slices, Values
from gact_graph.ops.bitmask import pack_bits, unpack_bits
from gact_graph.ops.quantize import DTYPES, Packed, pack

_ROUNDED = 1 << 12
"""The most deviations that a mean may take: float32 then rounds to 1/4096 of a deviation."""


@dataclass(eq=False)
class Quantized(Movable):
    """The codes of a tensor and the statistics of its groups."""

    packed: Packed
    bits: float = dataclasses.field()  # without the default of the base class
    codec = "quantize"
    makes_memory = True

    def decode(self) -> Tensor:
        return self.packed.unpack()

    def decorrelated(self) -> Encoded:
        return dataclasses.replace(self, packed=self.packed.decorrelated())

    def movable(self) -> tuple[Tensor, ...]:
        return *self.packed.tensors, *super().movable()

    def moved(self, *tensors: Tensor) -> Encoded:
        count = len(self.packed.tensors)
        parts: dict[str, Any] = dict(zip(self.parts, tensors[count:], strict=True))
        return dataclasses.replace(self, packed=self.packed.moved(*tensors[:count]), **parts)


@dataclass(eq=False)
class QuantizedWithSign(Quantized):
    """Codes and statistics, and one more bit per element: whether it is positive."""

    words: Tensor
    parts: ClassVar[tuple[str, ...]] = ("words",)

    def decode(self) -> Tensor:
        x = super().decode()
        positive = unpack_bits(self.words, x.shape, 0.0, 1.0, torch.bool)
        least = torch.finfo(x.dtype).tiny
        return torch.where(positive, x.clamp(min=least), x.clamp(max=0.0))

    def decorrelated(self) -> Encoded:
        return self  # clamped values are unbiased in neither decoding


class Quantize(Codec):
    """Encodes floating-point tensors that may carry noise, if the bits save memory."""

    def encode(self, request: Request) -> Quantized | None:
        x, reads = request.tensor, request.reads
        if x.dtype not in DTYPES or not isinstance(reads, Values) or reads.relative:
            return None
        bits = max(request.bits, reads.least_bits)
        if bits >= min(32, 8 * x.element_size()):
            return None
        if exceeds_float32(x, reads.slices):
            return None
        size = request.group_size
        widths = widths_of_groups(x, bits, size, request.row_weights, request.row_counts)
        packed = pack(x, int(bits), group_size=size, seed=request.seed, widths=widths)
        bits = packed.bits if widths is None else bits  # one width is rounded down
        if packed.groups is not None and packed.nbytes >= x.nbytes:
            return None  # the elements of groups with NaN or Inf take more memory than is saved
        if reads.sign:
            return QuantizedWithSign(packed, bits, pack_bits(x, "above"))
        return Quantized(packed, bits)


_LEAST_VARIANCE = 2.0**-200
"""The variance below which deviations are small beside the least step of codes, 2^-110."""


def exceeds_float32(x: Tensor, slices: Slices | None) -> bool:
    """Return whether float32, in which codes are made, rounds off the deviations of float64.

    Backward may subtract the exact mean from such elements.

    Args:
        x: A floating-point tensor.
        slices: The slices in which elements deviate from their mean. All elements are one slice if
            that is None, or of more elements: the others may be zero, and left out.
    """
    if x.dtype != torch.float64 or not x.numel():
        return False
    if slices is None or math.prod(slices[0]) != x.numel():
        slices = (x.numel(),), (0,)
    shape, dims = slices
    variance, mean = torch.var_mean(x.view(shape), dims, correction=0)
    constant = (variance == 0) & (mean.float() != mean)
    rounded = (mean.square() > variance * _ROUNDED**2) | (variance < _LEAST_VARIANCE)
    return bool(torch.any(constant | rounded & (variance > 0)))
