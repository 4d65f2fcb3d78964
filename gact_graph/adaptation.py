"""When to measure: all slots as soon as that can be done, later a few at a time."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from typing import Any

from torch import nn

from gact_graph.replay import Receive, Recording
from gact_graph.scheme import Scheme
from gact_graph.sensitivity import sensitivities

# Slots whose sensitivity is measured again at each interval, in rotation.
_REFRESHED = 1

ALARM = 0.5
"""One warning is given where compression makes up more than this share of the gradient's mean
square, and so more than the gradient itself and all its other variance together."""


class Adaptation:
    """Finds the bits of one model's slots from replays of its forwards.

    Args:
        scheme: Gets what is found.
        interval: Forwards from one refresh to the next.
    """

    def __init__(self, scheme: Scheme, interval: int) -> None:
        self.scheme = scheme
        self.passes = 0
        """Forward and backward passes that measuring has taken so far."""
        self._interval = interval
        self._forwards = 0
        self._turn = 0
        self._complained = False
        self._alarmed = False
        self._recording: Recording | None = None

    def measure(
        self,
        model: nn.Module,
        forward: Callable[..., Any],
        capture: Callable[[Any, str | None], AbstractContextManager[Any]],
    ) -> None:
        """Measures, where a recording is ready.

        Args:
            model: The model.
            forward: Its own forward.
            capture: Gives the context for a replay, from the arguments and the slot to reseed.
        """
        recording = self._recording
        if recording is None or not recording.ready:
            return
        self._recording = None
        if not recording.unchanged:
            self._complain("its inputs were changed in place since")
            return

        def replay(slot: str | None, receive: Receive) -> None:
            self.passes += 1
            recording.replay(model, forward, lambda inputs: capture(inputs, slot), receive)

        free = self.scheme.free
        slots = [slot for slot in free if self.scheme.sensitivity_of(slot) is None]
        if not slots and free:
            slots = [free[(self._turn + i) % len(free)] for i in range(min(_REFRESHED, len(free)))]
            self._turn += _REFRESHED
        if slots:
            self.scheme.measure(sensitivities(slots, self.scheme.bits_of, replay))
            self._warn_if_noise_dominates()

    def record(
        self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Recording | None:
        """At the start of a forward: what to watch its output with, where a measurement is due."""
        self._forwards += 1
        due = not self.scheme.measured or self._forwards % self._interval == 0
        if not due:
            return None
        recording = Recording(model, args, kwargs)
        if not recording.possible:
            self._complain("objects among its inputs hold tensors of another module's graph")
            return None
        self._recording = recording
        return recording

    def state_dict(self) -> dict[str, int]:
        """Counters, so that a resumed run measures when this one would."""
        return {"forwards": self._forwards, "turn": self._turn, "passes": self.passes}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        """Takes over what :meth:`state_dict` gave; what waits to be measured is dropped."""
        self._forwards, self._turn = state["forwards"], state["turn"]
        self.passes = state["passes"]
        self._recording = None

    def _warn_if_noise_dominates(self) -> None:
        """The alarm of the paper's section 4.2."""
        ratio = self.scheme.variance_ratio
        if self._alarmed or ratio is None or ratio <= ALARM:
            return
        self._alarmed = True
        cure = self.scheme.cure(ALARM / 2)
        advice = "level='lossless'" if cure is None else f"bits={cure:g}"
        warnings.warn(
            f"The noise of compression dominates the gradient: its variance is {ratio:.2g} of the "
            "gradient's mean square, which has it in it. Most of it comes from "
            f"{', '.join(self.scheme.worst())}. "
            f"Take more bits: by what was measured, {advice} brings it below {ALARM / 2:g}.",
            RuntimeWarning,
            stacklevel=4,
        )

    def __getstate__(self) -> dict[str, Any]:
        return vars(self) | {"_recording": None}

    def _complain(self, reason: str) -> None:
        if self._complained:
            return
        self._complained = True
        warnings.warn(
            "gact_graph could not measure which tensors need more bits, because a forward cannot "
            f"be run again: {reason}. Until one can, the bits stay as they are; adaptive=False "
            "asks for the same bits everywhere.",
            RuntimeWarning,
            stacklevel=4,
        )
