"""``round``: shorter floating-point numbers, with an error relative to each element.

The error of ``quantize`` is relative to the largest element of a group. If backward divides by
elements or takes their exponential, that is too large for small elements even at 16 bits: a common
scale of 16 bits for numbers from 1e-15 to 1 does not distinguish those below 1e-5.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from gact_graph.codecs.base import Movable
from gact_graph.codecs.codec import Codec, Request
from gact_graph.codecs.reads import Values


@dataclass(eq=False)
class Rounded(Movable):
    """float32 as bfloat16, float64 as its upper 32 bits.

    The relative error is at most 2^-8 and 2^-20. Zero, infinity and NaN are preserved.
    """

    short: Tensor
    dtype: torch.dtype
    codec = "round"
    parts: ClassVar[tuple[str, ...]] = ("short",)

    def __post_init__(self) -> None:
        self.bits: float | None = 8 * self.short.element_size()

    def decode(self) -> Tensor:
        if self.dtype == torch.float64:
            return self.short.long().bitwise_left_shift_(32).view(torch.float64)
        return self.short.to(self.dtype)


class Round(Codec):
    """Encodes tensors that backward needs with a small relative error."""

    def encode(self, request: Request) -> Rounded | None:
        x, reads = request.tensor, request.reads
        if not isinstance(reads, Values) or not reads.relative or request.bits == 32:
            return None
        if x.dtype == torch.float32:
            return Rounded(_bfloat16(x), x.dtype)
        if x.dtype == torch.float64:
            # float32 would turn 1e-50 into 0.
            return Rounded(x.view(torch.int64).bitwise_right_shift(32).int(), x.dtype)
        return None


def _bfloat16(x: Tensor) -> Tensor:
    # The conversion turns the largest float32 numbers into infinity.
    most = torch.finfo(torch.bfloat16).max
    short = x.to(torch.bfloat16)
    return torch.where(short.isinf() & x.isfinite(), short.sign() * most, short)
