r"""EXACT: the operations of a network, with tensors for backward kept in two bits per element.

Liu et al., `Extreme Activation Compression for Scalable Graph Neural Networks Training
<https://openreview.net/forum?id=vkaMaq95_rX>`_, ICLR 2022. A row of the projected activations
:math:`h R` is kept as codes :math:`\lfloor (h - Z) / r \cdot B + u \rfloor` with
:math:`B = 2^2 - 1`, its minimum :math:`Z`, its range :math:`r` and uniform noise :math:`u`;
:math:`R` has entries :math:`\pm 1 / \sqrt{k}`, so that :math:`E[R R^T] = I`.

Linear layers keep their projected inputs, batch norm its input, both in two bits; ReLU, leaky ReLU
and dropout keep one bit per element; a sparse product keeps only its matrix. The paper replaces
layers; here a mode replaces the operations that these layers call, so that it works with any
network. Operations without a version in EXACT, above all the messages of attention, stay PyTorch's.

With blocks: Eliassen and Selvan, `Activation Compression of Graph Neural Networks using Block-wise
Quantization <https://arxiv.org/abs/2309.11856>`_: the same, with one range for several rows.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.overrides import TorchFunctionMode

from gact_graph.ops.bitmask import pack_bits, unpack_bits

SHARE = 8
"""The width of rows over that of projected rows."""

Kept = tuple[tuple[Tensor, ...], Callable[..., Tensor]]
"""Tensors, and the function that restores the original tensor from them."""

_LEVELS = 3  # two bits: codes 0 to 3
_A_BYTE = 4  # codes


def pack_rows(x: Tensor, generator: torch.Generator) -> tuple[Tensor, Tensor, Tensor]:
    """Pack a float32 matrix [R, W] into two bits per element, unbiased over the noise.

    Returns:
        The codes, four to a byte, uint8 [R, ceil(W / 4)]; the smallest value and the distance of
        two codes of each row, bfloat16 [R, 1].
    """
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
    return (codes << shifts).sum(-1, dtype=torch.uint8), low, step


def unpack_rows(codes: Tensor, low: Tensor, step: Tensor, width: int) -> Tensor:
    """Return the matrix, float32 [R, W], from the results of :func:`pack_rows`."""
    shifts = torch.arange(0, 8, 2, dtype=torch.uint8, device=codes.device)
    values = ((codes.unsqueeze(-1) >> shifts) & _LEVELS).flatten(1)[:, :width].float()
    return values.mul_(step.float()).add_(low.float())


def _rounded(x: Tensor, towards: float) -> Tensor:
    """Return ``x`` in bfloat16, rounded to the given side."""
    near = x.to(torch.bfloat16)
    beyond = near.float() > x if towards < 0 else near.float() < x
    return torch.where(beyond, torch.nextafter(near, torch.full_like(near, towards)), near)


def projection(width: int, share: int, generator: torch.Generator, device: torch.device) -> Tensor:
    """Return the random matrix [width, ceil(width / share)] with entries of plus and minus one over
    the root of its second size."""
    size = -(-width // share)
    signs = torch.randint(2, (width, size), generator=generator, device=device)
    return (2.0 * signs - 1.0) / math.sqrt(size)


class Exact(TorchFunctionMode):
    """A mode with EXACT's operations in place of PyTorch's.

    Args:
        device: The device of the network.
        block: Rows that share a range: 1 for EXACT, more for block-wise EXACT.
        seed: The seed of the noise and of the projections; torch's own generator is not used.
        share: The width of rows over that of projected rows; 1 projects nothing.

    Attributes:
        nbytes: Bytes of all tensors saved so far by these operations, without their inputs.
    """

    def __init__(
        self, device: torch.device, block: int = 1, seed: int = 0, share: int = SHARE
    ) -> None:
        super().__init__()
        self.generator = torch.Generator(device).manual_seed(seed)
        self.nbytes = 0
        self._block, self._share = block, share

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        place = {F.linear: 0, torch.addmm: 1, F.batch_norm: 0}.get(func)
        values = _TWO_VALUES.get(func)
        if not torch.is_grad_enabled() or (place is None and values is None):
            return func(*args, **kwargs)
        keep = self.keep if func is F.batch_norm or self._share == 1 else self.project

        def pack(saved: Tensor) -> Tensor | Kept:
            if values is not None:
                return self._counted(_bits(saved, *values))
            x = args[place or 0]
            is_x = saved.data_ptr() == x.data_ptr() and saved.numel() == x.numel()
            if not is_x or (func is F.batch_norm and x.dim() != 2):
                self.nbytes += saved.nbytes * (saved.data_ptr() not in inputs)
                return saved
            shape = saved.shape
            tensors, restore = self._counted(keep(saved.detach().reshape(-1, saved.size(-1))))
            return tensors, lambda *kept: restore(*kept).view(shape)

        inputs = {arg.data_ptr() for arg in (*args, *kwargs.values()) if isinstance(arg, Tensor)}
        with saved_tensors_hooks(pack, _unpack):
            return func(*args, **kwargs)

    def _counted(self, kept: Kept) -> Kept:
        self.nbytes += sum(tensor.nbytes for tensor in kept[0])
        return kept

    def keep(self, x: Tensor) -> Kept:
        """Keep a matrix [N, W] in two bits per element."""
        shape = x.shape
        if self._block > 1:
            # The last block may lack some rows, which are filled with its last element.
            flat = x.reshape(-1)
            width = self._block * x.size(1)
            x = torch.cat([flat, flat[-1:].expand(-flat.numel() % width)]).view(-1, width)
        width = x.size(1)

        def restore(codes: Tensor, low: Tensor, step: Tensor) -> Tensor:
            rows = unpack_rows(codes, low, step, width)
            return rows.view(-1)[: shape.numel()].view(shape)

        return pack_rows(x.float(), self.generator), restore

    def project(self, x: Tensor) -> Kept:
        """Keep the rows of a matrix, made narrower by a random matrix."""
        matrix = projection(x.size(1), self._share, self.generator, x.device)
        tensors, restore = self.keep(x @ matrix)
        return (*tensors, matrix), lambda *kept: restore(*kept[:-1]) @ kept[-1].T


_TWO_VALUES: dict[Callable[..., Any], tuple[float, float | None]] = {
    F.relu: (0.0, 1.0),
    F.leaky_relu: (-1.0, 1.0),
    F.dropout: (0.0, None),
}
"""Operations whose backward distinguishes two kinds of elements, and the values of these kinds;
None takes the largest value of the saved tensor."""


def _bits(saved: Tensor, low: float, high: float | None) -> Kept:
    value = float(saved.max()) if high is None else high
    shape, dtype = saved.shape, saved.dtype
    words = pack_bits(saved > 0)
    return (words,), lambda words: unpack_bits(words, shape, low, value, dtype)


def _unpack(kept: Tensor | Kept) -> Tensor:
    return kept if isinstance(kept, Tensor) else kept[1](*kept[0])
