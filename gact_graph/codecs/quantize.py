"""``quantize``: a code of b bits for each element, by unbiased rounding."""

from __future__ import annotations

import torch
from torch import Tensor

from gact_graph.codecs.base import Codec, Encoded, Request
from gact_graph.codecs.reads import Values
from gact_graph.ops.bitmask import pack_bits, unpack_bits
from gact_graph.ops.quantize import DTYPES, Packed, pack


class Quantized(Encoded):
    """The codes of a tensor and the statistics of its groups."""

    codec = "quantize"

    def __init__(self, packed: Packed) -> None:
        self.packed = packed
        self.bits = packed.bits

    @property
    def nbytes(self) -> int:
        return self.packed.nbytes

    def decode(self) -> Tensor:
        return self.packed.unpack()

    def decorrelated(self) -> Encoded:
        return Quantized(self.packed.decorrelated())

    def movable(self) -> tuple[Tensor, ...]:
        return self.packed.tensors

    def moved(self, *tensors: Tensor) -> Quantized:
        return Quantized(self.packed.moved(*tensors))


class QuantizedWithSign(Quantized):
    """Codes and statistics, and one more bit per element: whether it is positive."""

    def __init__(self, packed: Packed, words: Tensor) -> None:
        super().__init__(packed)
        self.words = words

    @property
    def nbytes(self) -> int:
        return super().nbytes + self.words.nbytes

    def decode(self) -> Tensor:
        x = super().decode()
        positive = unpack_bits(self.words, x.shape, 0.0, 1.0, torch.bool)
        least = torch.finfo(x.dtype).tiny
        return torch.where(positive, x.clamp(min=least), x.clamp(max=0.0))

    def decorrelated(self) -> Encoded:
        return self  # clamped values are unbiased in neither decoding

    def movable(self) -> tuple[Tensor, ...]:
        return *super().movable(), self.words

    def moved(self, *tensors: Tensor) -> QuantizedWithSign:
        *packed, words = tensors
        return QuantizedWithSign(super().moved(*packed).packed, words)


class Quantize(Codec):
    """Encodes floating-point tensors that may carry noise, if the bits save memory."""

    def encode(self, request: Request) -> Quantized | None:
        x, reads = request.tensor, request.reads
        if x.dtype not in DTYPES or not isinstance(reads, Values) or reads.relative:
            return None
        bits = max(request.bits, reads.least_bits)
        if bits >= min(32, 8 * x.element_size()):
            return None
        packed = pack(x, bits, group_size=request.group_size, seed=request.seed)
        if packed.groups is not None and packed.nbytes >= x.nbytes:
            return None  # the elements of groups with NaN or Inf take more memory than is saved
        return QuantizedWithSign(packed, pack_bits(x, "above")) if reads.sign else Quantized(packed)
