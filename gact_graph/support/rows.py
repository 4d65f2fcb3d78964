"""The rows of a report: one a context, one a layer."""

from __future__ import annotations

from dataclasses import dataclass

RECOMPUTED = "blocks"
"""The codec of messages that stock autograd would save and that are made anew in backward."""


@dataclass
class Row:
    """One context: what stock autograd would hold for it and what is held instead, in bytes.

    ``host_bytes`` are those of ``stored_bytes`` that were swapped to host memory.
    """

    slot: str
    role: str
    codec: str
    shape: tuple[int, ...]
    numel: int
    bits: int | None
    raw_bytes: int
    stored_bytes: int
    sensitivity: float | None = None
    host_bytes: int = 0


@dataclass(frozen=True)
class LayerRow:
    """What became of one layer, or of one call in it.

    Attributes:
        slot: Its name.
        way: ``blocks``, ``recomputed``, or ``stock`` where neither could be had.
        blocks: How many.
        reason: Why it ran as stock.
        counted: Whether the report's raw bytes have what stock autograd would save in it.
    """

    slot: str
    way: str
    blocks: int | None
    reason: str | None
    counted: bool = True
