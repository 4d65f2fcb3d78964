"""The noise of dropout on a CPU, with the bits of PyTorch and in a fraction of its time.

PyTorch draws one number after the other. :func:`dropout_noise` draws the same numbers from the same
generator, in vectors, and leaves the generator in the same state.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from gact_graph.ops import cpu
from gact_graph.ops.bitmask import unpack_bits
from gact_graph.ops.checks import TILE
from gact_graph.ops.kernels.once import once
from gact_graph.ops.reference import bernoulli as reference
from gact_graph.ops.registration import dispatched
from gact_graph.support.run_state import generators

_draw_bits = dispatched(reference.draw_bits)

_TRIAL = 1_001
"""Draws that are compared with PyTorch's: they span several states, and end within a word."""


class DropoutNoise(NamedTuple):
    """The noise by which dropout multiplies a tensor.

    Args:
        words: Which elements remain [ceil(numel / 64)], int64, as of
            :mod:`gact_graph.ops.bitmask`.
        scale: The factor of elements that remain, 1 / (1 - p).
    """

    words: Tensor
    scale: float

    def tensor(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Return the noise as a tensor, new and contiguous."""
        return unpack_bits(self.words, shape, 0.0, self.scale, dtype)


def dropout_noise(x: Tensor, p: float) -> DropoutNoise | None:
    """Draw the noise of a dropout.

    Args:
        x: A contiguous floating-point tensor on the CPU.
        p: The probability of 0, above 0 and below 1.

    Returns:
        The noise, equal to ``torch.empty_like(x).bernoulli_(1 - p).div_(1 - p)``. None, without a
        draw, if there is no kernel that draws as PyTorch does: PyTorch with MKL has another
        generator on processors of Intel.
    """
    if not draws_as_torch():
        return None
    words = torch.empty(-(-x.numel() // TILE), dtype=torch.int64, device="cpu")
    with generators():  # another thread would draw the same noise
        state = torch.get_rng_state()
        _draw_bits(state, words, x.numel(), 1 - p)
        torch.set_rng_state(state)
    scale = torch.ones((), dtype=x.dtype, device="cpu").div_(1 - p).item()
    return DropoutNoise(words, scale)


@once
def draws_as_torch() -> bool:
    """Return whether the kernel exists and agrees with PyTorch."""
    if cpu.load() is None:
        return False
    draws = []
    for draw in (_draw_bits, reference.draw_bits):
        state = torch.Generator("cpu").manual_seed(1).get_state()
        words = torch.empty(-(-_TRIAL // TILE), dtype=torch.int64, device="cpu")
        draw(state, words, _TRIAL, 0.3)
        draws.append((state, words))
    return all(map(torch.equal, *draws))
