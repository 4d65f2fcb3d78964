"""``quantize``: b bits an element, unbiased."""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor

from gact_graph.bitmask import pack_bits, unpack_bits
from gact_graph.codecs.base import Codec, Encoded, Request
from gact_graph.operations import Values
from gact_graph.quantizer import DTYPES, Packed, pack


class Quantized(Encoded):
    """A context as codes and group statistics."""

    codec = "quantize"
    exact = False

    def __init__(self, packed: Packed) -> None:
        self.packed = packed
        self.bits = packed.bits

    @property
    def nbytes(self) -> int:
        return self.packed.nbytes

    def decode(self) -> Tensor:
        return self.packed.unpack()

    def movable(self) -> tuple[Tensor, ...]:
        assert self.packed.stats is not None  # what pack only keeps is not quantized
        return self.packed.codes, self.packed.stats

    def moved(self, *tensors: Tensor) -> Quantized:
        codes, stats = tensors
        return Quantized(dataclasses.replace(self.packed, codes=codes, stats=stats))


class QuantizedWithSign(Quantized):
    """Codes, and one bit more an element: whether it is positive."""

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

    def movable(self) -> tuple[Tensor, ...]:
        return *super().movable(), self.words

    def moved(self, *tensors: Tensor) -> QuantizedWithSign:
        *packed, words = tensors
        return QuantizedWithSign(super().moved(*packed).packed, words)


class Quantize(Codec):
    """Takes floating-point contexts that may carry noise, where the width saves something."""

    exact = False

    def encode(self, request: Request) -> Quantized | None:
        x, reads = request.tensor, request.reads
        if x.dtype not in DTYPES or not isinstance(reads, Values):
            return None
        bits = max(request.bits, reads.least_bits)
        if bits >= min(32, 8 * x.element_size()):
            return None
        packed = pack(x, bits, group_size=request.group_size, seed=request.seed)
        return QuantizedWithSign(packed, pack_bits(x, "above")) if reads.sign else Quantized(packed)
