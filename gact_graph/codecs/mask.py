"""``mask``: one bit per element, for tensors of two values or of which backward reads a comparison.

Bool tensors have two values, and so have the float tensors that dropout saves on the CPU. Of the
tensors that ``relu``, ``clamp`` and similar operations save, backward reads on which side of a
bound each element lies.
"""

from __future__ import annotations

import copy

import torch
from torch import Tensor

from gact_graph.codecs.base import Codec, Encoded, Request
from gact_graph.codecs.reads import Side, Sign
from gact_graph.ops.bitmask import pack_bits, pack_pair, unpack_bits
from gact_graph.support.storage import sample_of


class Masked(Encoded):
    """One bit per element, and the values of both bits."""

    codec = "mask"

    def __init__(self, words: Tensor, like: Tensor, low: float, high: float, exact: bool) -> None:
        self.words = words
        self.numel = like.numel()
        self.dtype = like.dtype
        self.low = low
        self.high = high
        self.exact = exact

    @property
    def nbytes(self) -> int:
        return self.words.nbytes

    def decode(self) -> Tensor:
        return unpack_bits(self.words, (self.numel,), self.low, self.high, self.dtype)

    def movable(self) -> tuple[Tensor, ...]:
        return (self.words,)

    def moved(self, *tensors: Tensor) -> Masked:
        other = copy.copy(self)
        [other.words] = tensors
        return other


class Signs(Encoded):
    """Two bits per element: whether it is positive, and whether it is negative."""

    codec = "mask"

    def __init__(self, x: Tensor) -> None:
        self.positive = Masked(pack_bits(x, "above"), x, 0.0, 1.0, exact=False)
        self.negative = Masked(pack_bits(x < 0), x, 0.0, 1.0, exact=False)

    @property
    def nbytes(self) -> int:
        return self.positive.nbytes + self.negative.nbytes

    def decode(self) -> Tensor:
        return self.positive.decode().sub_(self.negative.decode())

    def movable(self) -> tuple[Tensor, ...]:
        return self.positive.words, self.negative.words

    def moved(self, *tensors: Tensor) -> Signs:
        other = copy.copy(self)
        positive, negative = tensors
        other.positive, other.negative = (
            self.positive.moved(positive),
            self.negative.moved(negative),
        )
        return other


class Mask(Codec):
    """Encodes bool tensors, float tensors of two values, and those read as a side or a sign."""

    lossless = True

    def encode(self, request: Request) -> Encoded | None:
        x, reads = request.tensor, request.reads
        if x.dtype == torch.bool:
            return Masked(pack_bits(x), x, 0.0, 1.0, exact=True)
        if not x.dtype.is_floating_point:
            return None
        if isinstance(reads, Side):
            return Masked(reads.words(x), x, reads.low, reads.high, exact=False)
        if isinstance(reads, Sign):
            return Signs(x)
        return _of_two_values(request)


def _of_two_values(request: Request) -> Masked | None:
    x = request.tensor
    # A few elements suffice to rule out nearly all tensors. On a GPU, reading them waits for the
    # device, which only dropout is worth.
    on_cpu = x.device.type == "cpu"
    if not (on_cpu or "dropout" in request.operation) or not x.numel():
        return None
    if on_cpu and len({*x[:: -(-x.numel() // 8)].tolist()}) > 2:  # eight are mostly enough
        return None
    if len({*sample_of(x, 64)}) > 2:
        return None
    low, high = torch.stack(x.aminmax()).tolist()  # waits for the device once
    words, matched = pack_pair(x, low, high)
    return Masked(words, x, low, high, exact=True) if matched else None
