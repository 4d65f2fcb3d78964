"""Two bits an element with a range for each row, and random projection: EXACT's formulas.

EXACT: Liu et al., `Extreme Activation Compression for Scalable Graph Neural Networks Training
<https://openreview.net/forum?id=vkaMaq95_rX>`_, ICLR 2022. A row of the projected activations
:math:`h R` is kept as codes :math:`\\lfloor (h - Z) / r \\cdot B + u \\rfloor` with
:math:`B = 2^2 - 1`, its minimum :math:`Z`, its range :math:`r` and uniform noise :math:`u`;
:math:`R` has entries :math:`\\pm 1 / \\sqrt{k}`, so that :math:`E[R R^T] = I`.

With blocks: Eliassen and Selvan, `Activation Compression of Graph Neural Networks using Block-wise
Quantization <https://arxiv.org/abs/2309.11856>`_: the same, with a range for several rows.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

_LEVELS = 3  # two bits: codes 0 to 3
_A_BYTE = 4  # codes


@dataclass(frozen=True)
class Rows:
    """The codes of a matrix.

    Attributes:
        codes: Four to a byte, uint8 [R, ceil(W / 4)].
        low, step: Smallest value and distance of two codes of each row, bfloat16 [R, 1].
        width: W.
    """

    codes: Tensor
    low: Tensor
    step: Tensor
    width: int

    @property
    def tensors(self) -> tuple[Tensor, Tensor, Tensor]:
        """All that it holds."""
        return self.codes, self.low, self.step

    def unpack(self) -> Tensor:
        """The decoded matrix, float32 [R, W]."""
        shifts = torch.arange(0, 8, 2, dtype=torch.uint8, device=self.codes.device)
        codes = (self.codes.unsqueeze(-1) >> shifts) & _LEVELS
        values = codes.flatten(1)[:, : self.width].float()
        return values.mul_(self.step.float()).add_(self.low.float())


def pack_rows(x: Tensor, generator: torch.Generator) -> Rows:
    """Keep a float32 matrix [R, W] in two bits an element; right on average over the noise."""
    smallest, largest = x.aminmax(dim=1, keepdim=True)
    # Rounded away from the values, so that none of them needs a code beyond the last one.
    low = _rounded(smallest, -math.inf)
    step = _rounded((largest - low.float()) / _LEVELS, math.inf)
    noise = torch.rand(x.shape, generator=generator, device=x.device)
    scale = torch.where(step > 0, step, 1).float()
    codes = noise.add_((x - low.float()).div_(scale)).floor_().clamp_(0, _LEVELS).to(torch.uint8)
    codes = torch.nn.functional.pad(codes, (0, -x.size(1) % _A_BYTE))
    codes = codes.view(x.size(0), -1, _A_BYTE)
    shifts = torch.arange(0, 8, 2, dtype=torch.uint8, device=x.device)
    packed = (codes << shifts).sum(-1, dtype=torch.uint8)
    return Rows(packed, low, step, x.size(1))


def _rounded(x: Tensor, towards: float) -> Tensor:
    """In bfloat16, on the given side of ``x``."""
    near = x.to(torch.bfloat16)
    beyond = near.float() > x if towards < 0 else near.float() < x
    return torch.where(beyond, torch.nextafter(near, torch.full_like(near, towards)), near)


def projection(width: int, share: int, generator: torch.Generator, device: torch.device) -> Tensor:
    """The random matrix [width, ceil(width / share)] of entries plus and minus one over the root
    of its second size."""
    size = -(-width // share)
    signs = torch.randint(2, (width, size), generator=generator, device=device)
    return (2.0 * signs - 1.0) / math.sqrt(size)
