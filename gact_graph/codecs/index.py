"""``index``: an integer tensor in the narrowest type that holds it."""

from __future__ import annotations

from collections.abc import Hashable

import torch
from torch import Tensor

from gact_graph.codecs.base import Codec, Encoded, Request
from gact_graph.support.storage import sample_of

_NARROW = (torch.uint8, torch.int8, torch.int16, torch.int32)


class Narrowed(Encoded):
    """The same integers in a narrower type.

    They stay on the device: all layers share the edges, and each reads them several times.
    """

    codec = "index"
    exact = True

    def __init__(self, values: Tensor, dtype: torch.dtype) -> None:
        self.values = values
        self.dtype = dtype

    @property
    def nbytes(self) -> int:
        return self.values.nbytes

    def decode(self) -> Tensor:
        return self.values.to(self.dtype)

    def fingerprint(self) -> Hashable:
        kind = (self.codec, self.dtype, self.values.dtype, self.values.numel(), self.values.device)
        return *kind, sample_of(self.values)

    def equals(self, other: Encoded) -> bool:
        return isinstance(other, Narrowed) and torch.equal(self.values, other.values)


class Index(Codec):
    """Takes integers that a narrower type can hold."""

    lossless = True

    def encode(self, request: Request) -> Narrowed | None:
        x = request.tensor
        if x.dtype not in (torch.int64, torch.int32, torch.int16) or not x.numel():
            return None
        least, most = torch.stack(x.aminmax()).tolist()  # one wait for the device
        for dtype in _NARROW:
            info = torch.iinfo(dtype)
            if info.min <= least and most <= info.max:
                return (
                    None if dtype.itemsize >= x.element_size() else Narrowed(x.to(dtype), x.dtype)
                )
        return None
