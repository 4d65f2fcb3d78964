"""The seed of each slot's quantization noise."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass


@dataclass(frozen=True)
class Noise:
    """Seeds for one forward: the same slots get the same noise whenever it is run.

    Args:
        seed: That of the wrapped model.
        forward: How many forwards were compressed before this one.
    """

    seed: int
    forward: int

    def seed_of(self, slot: str) -> int:
        """The seed of a slot: 64 bits of a hash."""
        text = f"{self.seed}\0{self.forward}\0{slot}"
        return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little")
