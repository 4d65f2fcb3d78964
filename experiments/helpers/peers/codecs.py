"""Schemes that compress all tensors that autograd saves, as codecs of the library.

These codecs come before all others. Both papers keep masks in one bit, as the library does, so
these codecs leave tensors of two values to the library. If the paper has a ReLU of its own, they
also leave tensors whose backward reads only the side.
"""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor

from gact_graph.codecs import Codec, Encoded, Exact, Kept, Mask, Request, Side, Sign
from gact_graph.codecs.quantize import Quantized
from gact_graph.ops.quantize import pack


class WithoutGraphs(Codec):
    """GACT's own scheme: every floating-point tensor that is saved, messages as well as nodes.

    Liu et al., ICML 2022: groups of 256 elements with a minimum and a step each, unbiased rounding,
    bits by sensitivity. A ReLU keeps its output, quantized; indices stay unchanged.
    """

    def encode(self, request: Request) -> Encoded:
        x = request.tensor
        # With exact reads, Mask takes only tensors of two values.
        mask = Mask().encode(dataclasses.replace(request, reads=Exact()))
        if mask is not None:
            return mask
        if not x.dtype.is_floating_point or request.bits >= 8 * x.element_size():
            return Kept(x, request.slot)
        bits = round(request.bits)  # one width for all groups
        return Quantized(pack(x, bits, group_size=request.group_size, seed=request.seed), bits)


class EightBits(Encoded):
    """A tensor in 8 bits per element: uint8 ``codes`` of a range that begins at ``low``."""

    codec = "8 bits"

    def __init__(self, x: Tensor, low: Tensor, width: Tensor, generator: torch.Generator) -> None:
        scale = 255 / torch.where(width > 0, width, 1)
        noise = torch.rand(x.shape, generator=generator, device=x.device)
        codes = noise.add_((x.float() - low).mul_(scale)).floor_().clamp_(0, 255)
        self.codes = codes.to(torch.uint8)
        self.low, self.width, self.dtype = low, width, x.dtype

    @property
    def nbytes(self) -> int:
        return self.codes.nbytes + self.low.nbytes + self.width.nbytes

    def decode(self) -> Tensor:
        return self.codes.float().mul_(self.width / 255).add_(self.low).to(self.dtype)


class RunningRange(Codec):
    """Mesa: 8 bits, in a range that follows the tensor's own by a running mean.

    Pan et al., `Mesa: A Memory-saving Training Framework for Transformers
    <https://arxiv.org/abs/2111.11124>`_. The range starts at b and has the width a; at every step
    both become 0.9 of themselves plus 0.1 of the tensor's. A code is floor(255 (x - b) / a + u)
    with uniform noise u, clipped to 8 bits. A ReLU keeps one bit per element. Each tensor has one
    range, because most tensors of nodes have no heads.
    """

    decay = 0.9

    def __init__(self) -> None:
        self._ranges: dict[str, tuple[Tensor, Tensor]] = {}

    def encode(self, request: Request) -> Encoded | None:
        x = request.tensor
        if not x.dtype.is_floating_point:
            return Kept(x, request.slot) if x.dtype != torch.bool else None
        if isinstance(request.reads, Side | Sign) or not x.numel():
            return None
        if Mask().encode(dataclasses.replace(request, reads=Exact())) is not None:
            return None  # to the codec of masks
        generator = torch.Generator(x.device).manual_seed(request.seed % 2**63)
        return EightBits(x, *self._range(request.slot, x), generator)

    def _range(self, slot: str, x: Tensor) -> tuple[Tensor, Tensor]:
        low, high = x.float().aminmax()
        width = high - low
        if slot in self._ranges:
            before = self._ranges[slot]
            low = before[0] - (1 - self.decay) * (before[0] - low)
            width = before[1] - (1 - self.decay) * (before[1] - width)
        self._ranges[slot] = low, width
        return low, width
