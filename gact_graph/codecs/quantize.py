"""``quantize``: b bits an element, unbiased."""

from __future__ import annotations

from torch import Tensor

from gact_graph.codecs.base import Codec, Encoded, Request
from gact_graph.quantizer import DTYPES, Packed, pack


class Quantized(Encoded):
    """A context as codes and group statistics."""

    codec = "quantize"

    def __init__(self, packed: Packed) -> None:
        self.packed = packed
        self.bits = packed.bits

    @property
    def nbytes(self) -> int:
        return self.packed.nbytes

    def decode(self) -> Tensor:
        return self.packed.unpack()


class Quantize(Codec):
    """Takes floating-point contexts wherever the width saves something."""

    def accepts(self, request: Request) -> bool:
        tensor = request.tensor
        return tensor.dtype in DTYPES and request.bits < min(32, 8 * tensor.element_size())

    def encode(self, request: Request) -> Quantized:
        packed = pack(
            request.tensor, request.bits, group_size=request.group_size, seed=request.seed
        )
        return Quantized(packed)
