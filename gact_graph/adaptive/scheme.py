"""The scheme: the bits of each slot, and the measurements that they are based on."""

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
    check_mean_width,
    check_measured,
    check_width,
)
from gact_graph.codecs.group_widths import is_divided
from gact_graph.support.rows import Row

_NEW = 0.5
"""The weight of a new sensitivity that is smaller than the previous value. A larger one replaces it
at once, since too few bits are more harmful than too many."""

_TRUSTED = 2
"""The number of measurements before a slot may have few bits, and before old sensitivities are
averaged with new ones: in the first steps, those of some slots may be ten times as large as soon
after, and would reserve bits that no longer help."""

_TOLERATED = 0.25
"""The squared relative error of the gradient above which slots get bits beyond the average."""

_ON_TOP = 1.0
"""The largest number of such bits an element."""


class Scheme:
    """Bits by slot for one model.

    Args:
        average: The average of bits an element over the quantized contexts whose width is free.
            Contexts that are pinned, or whose operation requires more bits, are not included.
        pin: Bits for the slots whose names match a pattern, as in ``{"*.lin*": 8}``. The first
            matching pattern is used.
        group_size: Elements per group of the quantizer.
        planned: Bits of slots until they are measured; for good if they are 32.

    Attributes:
        gradient_error: The relative error of the gradient in the last measurement; None before.
    """

    def __init__(
        self,
        average: float,
        pin: Mapping[str, int],
        group_size: int,
        planned: Mapping[str, float] | None = None,
    ) -> None:
        self._average = average
        self._group_size = group_size
        self._pin = dict(pin)
        self._planned = dict(planned or {})
        self._sizes: dict[str, int] = {}
        self._sensitivities: dict[str, float] = {}
        self._bits: dict[str, float] = {}
        self._least: dict[str, int] = {}
        self._times: dict[str, int] = {}
        self._excess = 1.0
        self.gradient_error: float | None = None

    def bits_of(self, slot: str) -> float:
        """Return the width of a slot; as planned, or the average, rounded down, until measured."""
        pinned = self.pinned(slot)
        if pinned is not None:
            return pinned
        return self._bits.get(slot, self._planned.get(slot, max(1, int(self._average))))

    def sensitivity_of(self, slot: str) -> float | None:
        """Return c_l over the squared norm of the gradient, smoothed; None before a measurement."""
        return self._sensitivities.get(slot)

    @property
    def measured(self) -> bool:
        """Whether bits have been allocated.

        Slots that appeared since may still lack a measurement.
        """
        return bool(self._bits)

    def see(self, rows: Iterable[Row]) -> None:
        """Record the sizes of the quantized contexts of a forward."""
        for row in rows:
            if row.bits is not None:
                self._sizes[row.slot] = row.numel
                # An operation may require more bits than its slot has.
                if row.bits > self.bits_of(row.slot):
                    # The codec of 32 bits for float64 is asked for 16, as all that are lossy.
                    self._least[row.slot] = min(16, math.ceil(row.bits))

    @property
    def free(self) -> list[str]:
        """The slots whose width is not fixed, in the order of their first use."""
        return [slot for slot in self._sizes if self._fixed(slot) is None]

    def measure(self, sensitivities: Mapping[str, float], error: float, explained: float) -> None:
        """Record new sensitivities, and allocate bits to the slots that have one.

        Args:
            sensitivities: c_l over the squared norm of the gradient, by slot.
            error: The relative error of the gradient with the current bits.
            explained: The error that these sensitivities predict.
        """
        # Forward also quantizes tensors that turn out to belong to the caller, such as outputs.
        sensitivities = {slot: c for slot, c in sensitivities.items() if slot in self._sizes}
        # Sensitivities include neither correlated errors nor errors too large to be additive.
        self._excess = max(1.0, (error / explained) ** 2) if explained else 1.0
        self.gradient_error = error
        for slot, value in sensitivities.items():
            times = self._times.get(slot, 0)
            old = self._sensitivities[slot] if times >= _TRUSTED else value
            self._sensitivities[slot] = max(value, (1 - _NEW) * old + _NEW * value)
            self._times[slot] = times + 1
        free = self.free
        if not free or any(slot in self._sensitivities for slot in free):
            average = self._average
            bits = self._allocated(average)
            while self._ratio(bits) > _TOLERATED and average < self._average + _ON_TOP:
                average += 0.25
                bits = self._allocated(average)
            self._bits = bits

    @property
    def variance_ratio(self) -> float | None:
        """The variance that compression adds to the gradient, over the gradient's mean square.

        None before a measurement. The mean square includes the noise: above a half, the noise is
        more than the gradient and all its other variance together.
        """
        return self._ratio(self._bits) if self.measured else None

    def worst(self) -> list[str]:
        """Return the three slots that add most of that variance, the worst first."""
        shares = {slot: c * noise(self.bits_of(slot)) for slot, c in self._sensitivities.items()}
        return sorted(shares, key=lambda slot: -shares[slot])[:3]

    def average_for(self, ratio: float) -> float | None:
        """Return the least average of bits with this ratio, in steps of a half; None above 16."""
        for halves in range(2, 33):
            if self._ratio(self._allocated(halves / 2)) <= ratio:
                return halves / 2
        return None

    def _ratio(self, bits: Mapping[str, float]) -> float:
        # A slot has no allocated bits until it is measured.
        return self._excess * sum(
            c * noise(bits.get(slot, self.bits_of(slot))) for slot, c in self._sensitivities.items()
        )

    def _allocated(self, average: float) -> dict[str, float]:
        fixed = {slot: self._fixed(slot) for slot in self._sizes}
        least = max(1, math.floor(average))
        cautious = max(min(2, least), least - 1)
        free = allocate_by_name(
            self._sensitivities,
            {s: n for s, n in self._sizes.items() if fixed[s] is None and s in self._sensitivities},
            average,
            {s: cautious for s in self._sizes if self._times.get(s, 0) < _TRUSTED},
            {s for s, size in self._sizes.items() if is_divided(size, self._group_size)},
        )
        return {slot: bits or free[slot] for slot, bits in fixed.items() if bits or slot in free}

    def state_dict(self) -> dict[str, Any]:
        """Return the measurements and bits, as plain numbers by slot."""
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
        """Raise TypeError or ValueError unless :meth:`load_state_dict` accepts ``state``.

        Args:
            path: The name of the state in messages.
            state: Any object.
        """
        keys = ("sizes", "sensitivities", "bits", "least")
        # Version 0.6.0 did not save the others.
        check_keys(path, state, keys, ("times", "excess", "gradient_error"))
        assert isinstance(state, Mapping)
        checks = (check_count, check_measured, check_mean_width, check_width, check_count)
        for key, check in zip((*keys, "times"), checks, strict=True):
            check_by_slot(f"{path}[{key!r}]", state.get(key, {}), check)
        check_measured(f"{path}['excess']", state.get("excess", 1.0))
        if state.get("gradient_error") is not None:
            check_measured(f"{path}['gradient_error']", state["gradient_error"])
        # `least` keeps the slots of layers that were frozen since.
        for key in ("sensitivities", "bits"):
            for slot in state[key]:
                if slot not in state["sizes"]:
                    raise ValueError(
                        f"Expected {path}['sizes'] to have each slot of {path}[{key!r}] "
                        f"(got none for {slot!r})"
                    )

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load a state that :meth:`check_state` has accepted."""
        self._sizes = dict(state["sizes"])
        self._sensitivities = dict(state["sensitivities"])
        self._bits = dict(state["bits"])
        self._least = dict(state["least"])
        self._times = dict(state.get("times", dict.fromkeys(self._sensitivities, 1)))
        self._excess = state.get("excess", 1.0)
        self.gradient_error = state.get("gradient_error")

    def _fixed(self, slot: str) -> float | None:
        pinned = self.pinned(slot)
        least = self._least.get(slot)
        return least if pinned is None or (least is not None and least > pinned) else pinned

    def pinned(self, slot: str) -> int | None:
        """Return the bits that the user or a plan fixed; 32, the only ones of a plan, are exact."""
        own = 32 if self._planned.get(slot) == 32 else None
        return next((b for p, b in self._pin.items() if fnmatch.fnmatchcase(slot, p)), own)
