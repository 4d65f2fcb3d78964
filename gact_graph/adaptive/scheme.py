"""The scheme: how many bits each slot has, and what was measured to decide that."""

from __future__ import annotations

import fnmatch
import math
from collections.abc import Iterable, Mapping
from typing import Any

from gact_graph.adaptive.allocator import allocate_by_name, noise
from gact_graph.adaptive.state_checks import (
    check_by_slot,
    check_count,
    check_keys,
    check_measured,
    check_width,
)
from gact_graph.support.rows import Row

_NEW = 0.5
"""The weight of a new sensitivity that is smaller than the one before. A larger one replaces it at
once, because too few bits do more harm than too many."""

_TRUSTED = 2
"""Measurements before a slot may have few bits, and before old sensitivities count beside new ones:
those of the first steps may be ten times what they are soon after, in some slots and not in others,
and would keep bits where they help no more."""

_TOLERATED = 0.25
"""The squared error of the gradient, over its squared length, above which slots get bits on top of
the average."""

_ON_TOP = 1.0
"""The most bits an element that come on top."""


class Scheme:
    """Bits by slot for one model.

    Args:
        average: Bits an element on average over the quantized contexts whose width is free.
            Contexts that are pinned, or whose operation asks for more bits, do not count for it.
        pin: Bits for the slots whose names match a pattern, as in ``{"*.lin*": 8}``. The first
            pattern that matches counts.

    Attributes:
        gradient_error: How far the gradient was off when it was last measured, over its length;
            None before.
    """

    def __init__(self, average: float, pin: Mapping[str, int]) -> None:
        self._average = average
        self._pin = dict(pin)
        self._sizes: dict[str, int] = {}
        self._sensitivities: dict[str, float] = {}
        self._bits: dict[str, int] = {}
        self._least: dict[str, int] = {}
        self._times: dict[str, int] = {}
        self._excess = 1.0
        self.gradient_error: float | None = None

    def bits_of(self, slot: str) -> int:
        """The width to ask for: the average, rounded down, for a slot that was never measured."""
        pinned = self._pinned(slot)
        if pinned is not None:
            return pinned
        return self._bits.get(slot, max(1, int(self._average)))

    def keeps(self, slot: str) -> bool:
        """Whether the user pinned this slot to 32 bits: it is not quantized."""
        return self._pinned(slot) == 32

    def sensitivity_of(self, slot: str) -> float | None:
        """c_l over the squared length of the gradient, smoothed; None if it was never measured."""
        return self._sensitivities.get(slot)

    @property
    def measured(self) -> bool:
        """Whether bits were allocated, because all slots have been measured."""
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

    def measure(self, sensitivities: Mapping[str, float], error: float, explained: float) -> None:
        """Takes new sensitivities in, and allocates bits once all slots have one.

        Args:
            sensitivities: c_l over the squared length of the gradient, by slot.
            error: How far the gradient was off with the bits in force, over its length.
            explained: The error that these sensitivities predict.
        """
        # Forward also quantizes tensors that the caller turns out to hold, such as outputs.
        sensitivities = {slot: c for slot, c in sensitivities.items() if slot in self._sizes}
        # Sensitivities do not see correlated errors, nor errors too large to be additive.
        self._excess = max(1.0, (error / explained) ** 2) if explained else 1.0
        self.gradient_error = error
        for slot, value in sensitivities.items():
            times = self._times.get(slot, 0)
            old = self._sensitivities[slot] if times >= _TRUSTED else value
            self._sensitivities[slot] = max(value, (1 - _NEW) * old + _NEW * value)
            self._times[slot] = times + 1
        if all(slot in self._sensitivities for slot in self.free):
            self._bits = self._allocated_with_care()

    @property
    def variance_ratio(self) -> float | None:
        """The variance that compression adds to the gradient, over the gradient's mean square.

        None before it was measured. The mean square includes the noise: above a half, the noise is
        more than the gradient and all its other variance together.
        """
        return self._ratio(self._bits) if self.measured else None

    def worst(self, count: int = 3) -> list[str]:
        """The slots that add most of that variance, the worst first."""
        shares = {slot: c * noise(self.bits_of(slot)) for slot, c in self._sensitivities.items()}
        return sorted(shares, key=lambda slot: -shares[slot])[:count]

    def cure(self, ratio: float) -> float | None:
        """The least average of bits that has this ratio, in steps of a half; None above 16."""
        for halves in range(2, 33):
            if self._ratio(self._allocated(halves / 2)) <= ratio:
                return halves / 2
        return None

    def _ratio(self, bits: Mapping[str, int]) -> float:
        # A new slot has no bits of its own until all new slots are measured.
        return self._excess * sum(
            c * noise(bits.get(slot, self.bits_of(slot))) for slot, c in self._sensitivities.items()
        )

    def _allocated_with_care(self) -> dict[str, int]:
        average = self._average
        bits = self._allocated(average)
        while self._ratio(bits) > _TOLERATED and average < self._average + _ON_TOP:
            average += 0.25
            bits = self._allocated(average)
        return bits

    def _allocated(self, average: float) -> dict[str, int]:
        fixed = {slot: self._fixed(slot) for slot in self._sizes}
        least = max(1, math.floor(average))
        cautious = max(min(2, least), least - 1)
        found = allocate_by_name(
            self._sensitivities,
            {slot: size for slot, size in self._sizes.items() if fixed[slot] is None},
            average,
            {s: cautious for s in self._sizes if self._times.get(s, 0) < _TRUSTED},
        )
        return {slot: bits or found[slot] for slot, bits in fixed.items()}

    def state_dict(self) -> dict[str, Any]:
        """What was measured and decided, as plain numbers by slot."""
        return {
            "sizes": dict(self._sizes),
            "sensitivities": dict(self._sensitivities),
            "bits": dict(self._bits),
            "least": dict(self._least),
            "times": dict(self._times),
            "excess": self._excess,
            "gradient_error": self.gradient_error,
        }

    @staticmethod
    def check_state(path: str, state: object) -> None:
        """Raises TypeError or ValueError unless :meth:`load_state_dict` can take ``state``.

        Args:
            path: What to call the state in a message.
            state: Anything.
        """
        entries = {
            "sizes": check_count,
            "sensitivities": check_measured,
            "bits": check_width,
            "least": check_width,
        }
        check_keys(path, state, entries, ("times", "excess", "gradient_error"))
        assert isinstance(state, Mapping)
        # Version 0.6.0 did not save the others.
        check_by_slot(f"{path}['times']", state.get("times", {}), check_count)
        check_measured(f"{path}['excess']", state.get("excess", 1.0))
        if state.get("gradient_error") is not None:
            check_measured(f"{path}['gradient_error']", state["gradient_error"])
        for key, check in entries.items():
            check_by_slot(f"{path}[{key!r}]", state[key], check)
        for key in ("sensitivities", "bits", "least"):
            for slot in state[key]:
                if slot not in state["sizes"]:
                    raise ValueError(
                        f"Expected {path}['sizes'] to have each slot of {path}[{key!r}] "
                        f"(got none for {slot!r})"
                    )

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Takes over what :meth:`state_dict` gave and :meth:`check_state` has passed."""
        self._sizes = dict(state["sizes"])
        self._sensitivities = dict(state["sensitivities"])
        self._bits = dict(state["bits"])
        self._least = dict(state["least"])
        self._times = dict(state.get("times", dict.fromkeys(self._sensitivities, 1)))
        self._excess = state.get("excess", 1.0)
        self.gradient_error = state.get("gradient_error")

    def _fixed(self, slot: str) -> int | None:
        pinned = self._pinned(slot)
        least = self._least.get(slot)
        return least if pinned is None or (least is not None and least > pinned) else pinned

    def _pinned(self, slot: str) -> int | None:
        matches = (b for p, b in self._pin.items() if fnmatch.fnmatchcase(slot, p))
        return next(matches, None)
