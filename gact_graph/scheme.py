"""The scheme: which slot has how many bits, and what was measured to decide that."""

from __future__ import annotations

import fnmatch
from collections.abc import Iterable, Mapping
from typing import Any

from gact_graph.allocator import allocate_by_name, noise
from gact_graph.report import Row

# What a new measurement counts beside the ones before it.
_NEW = 0.5


class Scheme:
    """Bits by slot for one model.

    Args:
        average: Bits an element that the quantized contexts take on average.
        pin: Bits for the slots whose names match a pattern, as in ``{"*.lin*": 8}``; the first one
            that matches counts.
    """

    def __init__(self, average: float, pin: Mapping[str, int]) -> None:
        self._average = average
        self._pin = dict(pin)
        self._sizes: dict[str, int] = {}
        self._sensitivities: dict[str, float] = {}
        self._bits: dict[str, int] = {}
        self._least: dict[str, int] = {}

    def bits_of(self, slot: str) -> int:
        """The width to ask for; of a slot that was never measured the average, rounded down."""
        pinned = self._pinned(slot)
        if pinned is not None:
            return pinned
        return self._bits.get(slot, max(1, int(self._average)))

    def sensitivity_of(self, slot: str) -> float | None:
        """c_l over the squared length of the gradient, smoothed; None before it was measured."""
        return self._sensitivities.get(slot)

    @property
    def measured(self) -> bool:
        """Whether there was a sweep over all slots."""
        return bool(self._bits)

    def see(self, rows: Iterable[Row]) -> None:
        """Takes the sizes of the quantized contexts of a forward."""
        for row in rows:
            if row.bits is not None:
                self._sizes[row.slot] = row.numel
                # An operation may ask for more than its slot was given.
                if row.bits > self.bits_of(row.slot):
                    self._least[row.slot] = row.bits

    @property
    def free(self) -> list[str]:
        """The slots whose width is to be found, in the order in which they were first seen."""
        return [slot for slot in self._sizes if self._fixed(slot) is None]

    def measure(self, sensitivities: Mapping[str, float]) -> None:
        """Takes new sensitivities in, and allocates anew once all slots have one."""
        for slot, value in sensitivities.items():
            old = self._sensitivities.get(slot, value)
            self._sensitivities[slot] = (1 - _NEW) * old + _NEW * value
        if all(slot in self._sensitivities for slot in self.free):
            self._bits = self._allocated(self._average)

    @property
    def variance_ratio(self) -> float | None:
        """The variance that compression adds to the gradient, over the gradient's mean square.

        None before it was measured. The square has the noise in it: above a half, the noise is more
        than the gradient and all its other variance together.
        """
        return self._ratio(self._bits) if self.measured else None

    def worst(self, count: int = 3) -> list[str]:
        """The slots that add most of that variance."""
        shares = {slot: c * noise(self.bits_of(slot)) for slot, c in self._sensitivities.items()}
        return sorted(shares, key=lambda slot: -shares[slot])[:count]

    def cure(self, ratio: float) -> float | None:
        """The least average of bits, in steps of a half, for this ratio; None if even 16 fail."""
        for halves in range(2, 33):
            if self._ratio(self._allocated(halves / 2)) <= ratio:
                return halves / 2
        return None

    def _ratio(self, bits: Mapping[str, int]) -> float:
        return sum(c * noise(bits[slot]) for slot, c in self._sensitivities.items())

    def _allocated(self, average: float) -> dict[str, int]:
        fixed = {slot: self._fixed(slot) for slot in self._sizes}
        return allocate_by_name(
            self._sensitivities,
            self._sizes,
            {slot: bits for slot, bits in fixed.items() if bits is not None},
            average,
        )

    def state_dict(self) -> dict[str, Any]:
        """What was measured and decided, as plain numbers."""
        return {
            "sizes": dict(self._sizes),
            "sensitivities": dict(self._sensitivities),
            "bits": dict(self._bits),
            "least": dict(self._least),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Takes over what :meth:`state_dict` gave."""
        self._sizes = dict(state["sizes"])
        self._sensitivities = dict(state["sensitivities"])
        self._bits = dict(state["bits"])
        self._least = dict(state["least"])

    def _fixed(self, slot: str) -> int | None:
        pinned = self._pinned(slot)
        least = self._least.get(slot)
        return least if pinned is None or (least is not None and least > pinned) else pinned

    def _pinned(self, slot: str) -> int | None:
        matches = (b for p, b in self._pin.items() if fnmatch.fnmatchcase(slot, p))
        return next(matches, None)
