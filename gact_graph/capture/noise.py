"""The seed of each slot's quantization noise."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass


@dataclass(frozen=True)
class Noise:
    """The seeds of one forward: a slot gets the same noise in each run of it.

    Args:
        seed: The seed of the wrapped model.
        forward: The number of forwards that were compressed before.
    """

    seed: int
    forward: int

    def seed_of(self, slot: str) -> int:
        """Return the seed of a slot: 64 bits of a hash."""
        text = f"{self.seed}\0{self.forward}\0{slot}"
        return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little")
