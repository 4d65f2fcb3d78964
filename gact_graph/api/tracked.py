"""The state of a tracked method: its bits, and the bytes that it saves."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from gact_graph.adaptive.adaptation import Adaptation
from gact_graph.adaptive.scheme import Scheme
from gact_graph.adaptive.slot_names import with_new_names
from gact_graph.adaptive.state_checks import (
    check_count,
    check_flag,
    check_keys,
    check_measured,
    check_names,
)
from gact_graph.api.repeated import RepeatedInputs
from gact_graph.capture.config import Config
from gact_graph.capture.places import Places
from gact_graph.codecs import Kept
from gact_graph.support.exact import ExactSlots
from gact_graph.support.rows import RECOMPUTED, Row

NEWER = ("exactly", "compressible", "repeated", "places")
"""Entries of a state that version 0.7.0 did not save."""


@dataclass
class TrackedMethod:
    """The state of one tracked method.

    Attributes:
        scheme: The bits of each slot.
        adaptation: Chooses the bits; None if they are fixed.
        saved_bytes: Bytes that stock autograd would have saved in the last call; None before the
            first call.
        exact_slots: The slots that are kept exactly.
        inputs: Whether calls repeat with the same inputs.
        places: The operations whose results need no memory of their own.
        compressible: The share of ``saved_bytes`` by which compression can lower the peak, in the
            last call that was encoded completely; 1 before.
    """

    scheme: Scheme
    adaptation: Adaptation | None
    saved_bytes: int | None = None
    exact_slots: ExactSlots = field(default_factory=ExactSlots)
    inputs: RepeatedInputs = field(default_factory=RepeatedInputs)
    places: Places = field(default_factory=Places)
    compressible: float = 1.0

    @classmethod
    def under(cls, config: Config) -> TrackedMethod:
        """Return the state before the first call, under these settings."""
        scheme = Scheme(config.bits, config.pin, config.group_size, config.widths)
        adaptive = config.adaptive and config.quantize
        return cls(scheme, Adaptation(scheme, config.adapt_interval) if adaptive else None)

    def see(self, rows: Sequence[Row], saved_bytes: int) -> None:
        """Determine how far compression can lower the peak, from a completely encoded call.

        The bound is the bytes that stock saves, except contexts kept by reference, and except the
        largest context, which exists uncompressed while it is encoded and decoded.
        """
        coded = [row.raw_bytes for row in rows if row.codec not in (Kept.codec, RECOMPUTED)]
        kept = sum(row.raw_bytes for row in rows if row.codec == Kept.codec)
        self.compressible = (saved_bytes - kept - max(coded, default=0)) / max(saved_bytes, 1)

    def is_large(self, least: int) -> bool:
        """Return whether compression can save ``least`` bytes: the next call is encoded."""
        return (self.saved_bytes or 0) * self.compressible >= least

    def is_small(self, least: int) -> bool:
        """Return whether the last call shows that compression saves less than ``least`` bytes."""
        return self.saved_bytes is not None and not self.is_large(least)

    def state_dict(self) -> dict[str, Any]:
        """Return the state as plain numbers."""
        return {
            "scheme": self.scheme.state_dict(),
            "adaptation": None if self.adaptation is None else self.adaptation.state_dict(),
            "saved_bytes": self.saved_bytes,
            "exactly": self.exact_slots.state_dict(),
            "compressible": self.compressible,
            "repeated": self.inputs.repeated,
            "places": self.places.to_dict(),
        }

    def check_state(self, path: str, state: object) -> None:
        """Check that :meth:`load_state_dict` accepts a state.

        Args:
            path: The name of the state in messages.
            state: Any object.

        Raises:
            TypeError: If an entry is of the wrong type.
            ValueError: If a key is missing or unknown, or a value is out of range.
        """
        check_keys(path, state, ("scheme", "adaptation", "saved_bytes"), NEWER)
        assert isinstance(state, Mapping)
        adaptive = self.adaptation is not None
        if adaptive != (state["adaptation"] is not None):
            raise ValueError(
                f"Expected the state of a model with adaptive={adaptive} (got a state with "
                f"adaptive={not adaptive}); wrap the model with the same arguments as for the state"
            )
        self.scheme.check_state(f"{path}['scheme']", state["scheme"])
        if self.adaptation is not None:
            self.adaptation.check_state(f"{path}['adaptation']", state["adaptation"])
        if state["saved_bytes"] is not None:
            check_count(f"{path}['saved_bytes']", state["saved_bytes"])
        if "exactly" in state:
            exactly = f"{path}['exactly']"
            check_keys(exactly, state["exactly"], ("with_leaf", "without", "decided"))
            for kind in ("with_leaf", "without"):
                check_names(f"{exactly}[{kind!r}]", state["exactly"][kind])
            check_flag(f"{exactly}['decided']", state["exactly"]["decided"])
        check_measured(f"{path}['compressible']", state.get("compressible", 1.0))
        check_flag(f"{path}['repeated']", state.get("repeated", True))
        if "places" in state:
            check_keys(f"{path}['places']", state["places"], ("proven", "refuted"))
            for kind, names in state["places"].items():
                check_names(f"{path}['places'][{kind!r}]", names)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore a state that :meth:`check_state` accepts."""
        state = with_new_names(state)
        self.scheme.load_state_dict(state["scheme"])
        if self.adaptation is not None:
            self.adaptation.load_state_dict(state["adaptation"])
        self.saved_bytes = state["saved_bytes"]
        if "exactly" in state:
            self.exact_slots.load_state_dict(state["exactly"])
        self.compressible = state.get("compressible", 1.0)
        self.inputs = RepeatedInputs()
        self.inputs.repeated = state.get("repeated", True)
        if "places" in state:
            self.places = Places.from_dict(state["places"])
