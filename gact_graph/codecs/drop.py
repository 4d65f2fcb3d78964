"""``drop``: tensors that backward never reads."""

from __future__ import annotations

import torch
from torch import Tensor

from gact_graph.codecs.base import Encoded
from gact_graph.codecs.codec import Codec, Request
from gact_graph.codecs.reads import Nothing
from gact_graph.support.storage import Layout


class Dropped(Encoded):
    """A single NaN in place of the values, so that an unexpected reader is noticed."""

    codec = "drop"
    nbytes = 0

    def __init__(self, dtype: torch.dtype, device: torch.device) -> None:
        self.dtype = dtype
        self.device = device

    def decode(self) -> Tensor:
        return torch.full((1,), torch.nan, dtype=self.dtype, device=self.device)

    def restore(self, layout: Layout) -> Tensor:
        return self.decode()[0].expand(layout.shape)


class Drop(Codec):
    """Encodes floating-point tensors of which backward reads nothing."""

    lossless = True

    def encode(self, request: Request) -> Dropped | None:
        if not isinstance(request.reads, Nothing) or not request.tensor.dtype.is_floating_point:
            return None
        return Dropped(request.tensor.dtype, request.tensor.device)
