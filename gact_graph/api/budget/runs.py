"""On which shares of the graph a way is tried, so that no trial takes more than the budget."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import NamedTuple

from gact_graph.api.budget.growth import Growth, Highest, Line
from gact_graph.api.budget.trial import Trial

_FILLED = 0.8
"""Of the budget, what a trial is to fill on a share of a graph that may not fit."""

_WORTH_IT = 1.25
"""How much larger the next share has to be."""

_NO_PART = (IndexError, RuntimeError, ValueError)
"""What a model raises that takes the whole of a small graph, and no part of it."""


class Trials(NamedTuple):
    """What one way took on one or two shares of the graph."""

    shares: Sequence[float]
    trials: Sequence[Trial]

    @property
    def growth(self) -> Growth:
        """What it takes on any share."""
        by_step = zip(*(trial.peaks for trial in self.trials), strict=True)
        return Growth(
            Highest(tuple(map(self._line, by_step))),
            self._line([trial.saved_bytes or 0 for trial in self.trials]),
            Line(0.0, self.trials[-1].seconds / self.shares[-1]),
        )

    @property
    def raw(self) -> Line:
        """What stock saves."""
        return self._line([trial.raw_bytes or 0 for trial in self.trials])

    def _line(self, values: Sequence[float]) -> Line:
        return Line.through(self.shares[0], values[0], self.shares[-1], values[-1])


class Runs:
    """Chooses the shares of the graph on which a way is tried.

    Args:
        run: Tries it on a share, with blocks of a share of their edges.
        largest: The largest share: the whole of a small graph.
    """

    def __init__(self, run: Callable[[float, float], Trial], largest: float) -> None:
        self._run = run
        self._largest = largest

    def after_a_small_one(self) -> Trials:
        """The same as :meth:`all`, for a way of which no trial has run before.

        What a process has for ever after the first (kernels that are loaded, layers whose form is
        known) would count as what half a graph takes, and the whole would seem to take less.
        """
        with suppress(*_NO_PART):
            self._run(self._largest / 16, 1.0)
        return self.all()

    def all(self) -> Trials:
        """The whole, or the largest share and its half."""
        shares = [1.0] if self._largest == 1 else [self._largest / 2, self._largest]
        return Trials(shares, [self._run(share, 1.0) for share in shares])

    def within(self, memory: int) -> Trials:
        """The same where a trial keeps to the budget, else the two largest shares that do.

        What a share takes tells where the next one may be. Blocks are as large in a small graph as
        in a large one, and would tell of more than a larger share takes; so here they have a share
        of their edges, and the small graph as many of them as the larger one.
        """
        shares = [self._largest / 16, self._largest / 8]
        try:
            found = self._cut_as(self._largest, shares)
        except _NO_PART:
            return self.all()
        if found.growth.peak.at(self._largest) <= memory:
            return self.all()
        if self._largest < 1:
            found = self._cut_as(1.0, shares)
        while True:
            peak = found.growth.peak.at(1.0)
            if peak <= memory:
                return self.all()
            share = min(self._largest, _FILLED * memory / peak)
            if share < found.shares[-1] * _WORTH_IT:
                return found
            trials = [found.trials[-1], self._run(share, share)]
            found = Trials([found.shares[-1], share], trials)

    def _cut_as(self, share: float, shares: Sequence[float]) -> Trials:
        """Smaller shares, cut into as many blocks as this one."""
        return Trials(shares, [self._run(small, small / share) for small in shares])
