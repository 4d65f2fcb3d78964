"""``index``: integer tensors in the narrowest type that holds their values."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass

import torch
from torch import Tensor

from gact_graph.codecs.base import Encoded
from gact_graph.codecs.codec import Codec, Request
from gact_graph.support.content import mark_of, same

_NARROW = (torch.uint8, torch.int8, torch.int16, torch.int32)


@dataclass(eq=False)
class Narrowed(Encoded):
    """Integers in a narrower type.

    They stay on the device: all layers share the edges, and each reads them several times.

    Args:
        values: The integers.
        dtype: The dtype of the decoded tensor.
        mark: The fingerprint from :func:`gact_graph.support.content.mark_of`.
    """

    values: Tensor
    dtype: torch.dtype
    mark: tuple[int, ...]
    codec = "index"
    exact = True

    @property
    def nbytes(self) -> int:
        return self.values.nbytes

    def decode(self) -> Tensor:
        return self.values.to(self.dtype)

    def fingerprint(self) -> Hashable:
        kind = (self.codec, self.dtype, self.values.dtype, self.values.numel(), self.values.device)
        return *kind, self.mark

    def equals(self, other: Encoded) -> bool:
        return isinstance(other, Narrowed) and same(self.values, other.values)


class Index(Codec):
    """Encodes integers that a narrower type can hold."""

    lossless = True

    def encode(self, request: Request) -> Narrowed | None:
        x = request.tensor
        if x.dtype not in (torch.int64, torch.int32, torch.int16) or not x.numel():
            return None
        # Waits for the device once.
        least, most, *mark = torch.cat([torch.stack(x.aminmax()), mark_of(x)]).tolist()
        for dtype in _NARROW:
            info = torch.iinfo(dtype)
            if info.min <= least and most <= info.max:
                if dtype.itemsize >= x.element_size():
                    return None
                return Narrowed(x.to(dtype), x.dtype, tuple(mark))
        return None
