"""A context in two widths: what the narrow one does to the gradient shows beside the fine one."""

from __future__ import annotations

from dataclasses import dataclass, field

from gact_graph.codecs.base import Context, Encoded
from gact_graph.codecs.reads import Slices

FINER = 4
"""Bits above its own that a slot's error is measured against: 1/289 of the noise, or less."""


@dataclass
class Widths:
    """Which width is decoded, while a step is run again to measure.

    Attributes:
        fine: The slots that are decoded in their fine width; all others are in the narrow one.
        all_fine: Whether every slot is decoded in its fine width.
        read: The slots that were decoded since somebody cleared the set.
        slots: Bits of the narrow width of each slot.
        slices: The slices of each slot that backward brings to one scale, as in
            :class:`gact_graph.codecs.reads.Values`.
    """

    fine: set[str] = field(default_factory=set)
    all_fine: bool = False
    read: set[str] = field(default_factory=set)
    slots: dict[str, int] = field(default_factory=dict)
    slices: dict[str, Slices] = field(default_factory=dict)


class Compared(Context):
    """One context in the width that training takes and in a fine one.

    Args:
        slot: Its name.
        narrow: In the width of training.
        fine: In the fine width.
        widths: Tells which of both :attr:`encoded` is.
    """

    def __init__(self, slot: str, narrow: Encoded, fine: Encoded, widths: Widths) -> None:
        self._slot = slot
        self._narrow = narrow
        self._fine = fine
        self._widths = widths
        if narrow.bits is not None:
            widths.slots[slot] = narrow.bits

    @property
    def encoded(self) -> Encoded:
        self._widths.read.add(self._slot)
        is_fine = self._widths.all_fine or self._slot in self._widths.fine
        return self._fine if is_fine else self._narrow

    @encoded.setter
    def encoded(self, encoded: Encoded) -> None:
        self._narrow = self._fine = encoded
