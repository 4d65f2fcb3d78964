r"""The seed of each slot's quantization noise.

In training on one whole graph, an element of a saved tensor changes little from step to step. So
the noise of step t is that of the step before, moved by an irrational number,

.. math::
    u_t = (u_0 + t \alpha) \bmod 1,

in place of fresh noise. Each :math:`u_t` is uniform, so each step is unbiased; and any few
consecutive ones are spread evenly, so the errors of consecutive steps cancel in the averages that
an optimizer with momentum takes. The golden ratio spreads them best. But where the gradient depends
on products of two tensors' errors, equal numbers would keep both in step, and their product would
not cancel. So slots take different numbers, all of which rational numbers approximate badly (the
square roots of small integers, whose continued fractions have small terms).

Where an element is another node at each step, as in sampled batches, the noise is fresh: a batch
that returns after a certain number of steps would meet nearly its last noise.
"""

from __future__ import annotations

import hashlib
import math
from dataclasses import dataclass

_GRAINS = 1 << 16
"""The number of values of the noise."""

_RATIOS = ((math.sqrt(5) - 1) / 2, *(math.sqrt(n) % 1 for n in (2, 3, 6, 7, 11, 13, 21)))

_STRIDES = tuple(int(ratio * _GRAINS) | 1 for ratio in _RATIOS)
"""How far the noise moves at each step. Odd numbers, so that it repeats after 2^16 steps."""


@dataclass(frozen=True)
class Noise:
    """The seeds of one forward: a slot gets the same noise in each run of it.

    Args:
        seed: The seed of the wrapped model.
        forward: The number of forwards that were compressed before.
        repeated: Whether the forward before had the same inputs.
    """

    seed: int
    forward: int
    repeated: bool

    def seed_of(self, slot: str) -> int:
        """Return the seed of a slot: 48 bits of a hash, and the dither in the 16 bits above."""
        number = 0 if self.repeated else self.forward
        text = f"{self.seed}\0{number}\0{slot}"
        chosen = int.from_bytes(hashlib.blake2b(text.encode(), digest_size=6).digest(), "little")
        stride = _STRIDES[chosen % len(_STRIDES)] if self.repeated else 0
        return self.forward * stride % _GRAINS << 48 | chosen
