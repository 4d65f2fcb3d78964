"""``mask``: one bit per element, for tensors of two values or of which backward reads a comparison.

Bool tensors have two values, and so have the float tensors that dropout saves on the CPU. Of the
tensors that ``relu``, ``clamp`` and similar operations save, backward reads on which side of a
bound each element lies.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from gact_graph.codecs.base import Encoded, Movable, Saved
from gact_graph.codecs.codec import Codec, Request
from gact_graph.codecs.reads import Side, Sign
from gact_graph.ops.bitmask import pack_bits, pack_pair, unpack_bits
from gact_graph.ops.quantize import DTYPES
from gact_graph.support.content import spread_of


@dataclass(eq=False)
class Masked(Movable):
    """One bit per element, and the values of both bits."""

    words: Tensor
    numel: int
    dtype: torch.dtype
    low: float
    high: float
    exact: bool = False
    codec = "mask"
    parts: ClassVar[tuple[str, ...]] = ("words",)
    makes_memory = True

    def decode(self) -> Tensor:
        return unpack_bits(self.words, (self.numel,), self.low, self.high, self.dtype)


@dataclass(eq=False)
class Signs(Movable):
    """Two bits per element: whether it is positive, and whether it is negative."""

    positive: Tensor
    negative: Tensor
    numel: int
    dtype: torch.dtype
    codec = "mask"
    parts: ClassVar[tuple[str, ...]] = ("positive", "negative")

    def decode(self) -> Tensor:
        positive, negative = (
            unpack_bits(words, (self.numel,), 0.0, 1.0, self.dtype) for words in self.movable()
        )
        return positive.sub_(negative)


class Joint(Encoded):
    """The mask of another saved tensor, whose elements are positive where these ones are read.

    Args:
        other: The other tensor.
    """

    codec = "mask"
    nbytes = 0

    def __init__(self, other: Saved) -> None:
        self._other = other

    def decode(self) -> Tensor:
        return self._other.context.encoded.decode()


class Mask(Codec):
    """Encodes bool tensors, float tensors of two values, and those read as a side or a sign."""

    lossless = True

    def encode(self, request: Request) -> Encoded | None:
        x, reads = request.tensor, request.reads
        like = x.numel(), x.dtype
        if x.dtype == torch.bool:
            return Masked(pack_bits(x), *like, 0.0, 1.0, exact=True)
        if not x.dtype.is_floating_point:
            return None
        if isinstance(reads, Side):
            return Masked(reads.words(x), *like, reads.low, reads.high)
        if isinstance(reads, Sign):
            return Signs(pack_bits(x, "above"), pack_bits(x < 0), *like)
        return _of_two_values(request)


def _of_two_values(request: Request) -> Masked | None:
    x = request.tensor
    if x.dtype not in DTYPES:
        return None  # PyTorch cannot compare float8
    # A few elements suffice to rule out nearly all tensors. On a GPU, reading them waits for the
    # device, which only dropout is worth.
    on_cpu = x.device.type == "cpu"
    if not (on_cpu or "dropout" in request.operation) or not x.numel():
        return None
    if on_cpu and len({*x[:: -(-x.numel() // 8)].tolist()}) > 2:  # eight are mostly enough
        return None
    values = sorted({*spread_of(x, 64).tolist()})
    if len(values) > 2:
        return None
    # Waits for the device once more where the others are equal.
    low, high = values if len(values) == 2 else torch.stack(x.aminmax()).tolist()
    words, matched = pack_pair(x, low, high)
    return Masked(words, x.numel(), x.dtype, low, high, exact=True) if matched else None
