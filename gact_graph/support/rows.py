"""The rows of a report, for contexts and for layers."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

RECOMPUTED = "blocks"
"""The codec of messages that stock autograd would save, and that backward computes again."""


def numbered(counts: Counter[str], name: str, mark: str = "#") -> str:
    """Count a use of a name, and return the name: with the number of the use from the second on."""
    counts[name] += 1
    return name if counts[name] == 1 else f"{name}{mark}{counts[name]}"


@dataclass
class Row:
    """A context: the bytes that stock autograd would hold for it, and the bytes that are stored.

    ``numel`` counts the elements that are encoded: not those that a mask shows to be zero.
    ``host_bytes`` is the part of ``stored_bytes`` that was swapped to host memory.
    """

    slot: str
    role: str
    codec: str
    shape: tuple[int, ...]
    numel: int
    bits: float | None
    raw_bytes: int
    stored_bytes: int
    sensitivity: float | None = None
    host_bytes: int = 0


@dataclass(frozen=True)
class LayerRow:
    """The strategy of one layer, or of one call in the layer.

    Attributes:
        slot: The name of the layer.
        way: ``blocks``, ``recomputed``, or ``stock`` if neither was possible.
        blocks: The number of blocks.
        reason: The reason for running as stock.
        counted: Whether raw bytes in the report include the bytes that stock autograd would save.
    """

    slot: str
    way: str
    blocks: int | None
    reason: str | None
    counted: bool = True
