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

_LEAST_BLOCK = 1 / 32
"""Of the edges of a block: the share that is left of it in the smallest parts. Of a graph of which
these are less than that, blocks take little."""

_NO_PART = (IndexError, RuntimeError, ValueError)
"""What a model raises that takes the whole of a small graph, and no part of it."""


class Trials(NamedTuple):
    """What one way took on one or two shares of the graph.

    Attributes:
        shares: Of the graph.
        trials: On them.
        seconds: Of a step on the whole.
    """

    shares: Sequence[float]
    trials: Sequence[Trial]
    seconds: float

    @property
    def growth(self) -> Growth:
        """What it takes on any share."""
        by_step = zip(*(trial.peaks for trial in self.trials), strict=True)
        return Growth(
            Highest(tuple(map(self._line, by_step))),
            self._line([trial.saved_bytes or 0 for trial in self.trials]),
            Line(0.0, self.seconds),
        )

    @property
    def raw(self) -> Line:
        """What stock saves."""
        return self._line([trial.raw_bytes or 0 for trial in self.trials])

    def _line(self, values: Sequence[float]) -> Line:
        return Line.through(self.shares[0], values[0], self.shares[-1], values[-1])


class Runs:
    """Chooses the shares of the graph on which a way is tried.

    A small graph is cut into as many blocks as the whole: with blocks as large as those of the
    whole, its peak may be at another moment of the step, when less grows with the graph.

    Args:
        run: Tries it on a share, with blocks of a share of their edges.
        largest: The largest share: the whole of a small graph.
    """

    def __init__(self, run: Callable[[float, float], Trial], largest: float) -> None:
        self._run = run
        self._largest = largest
        self._shares = [1.0] if largest == 1 else [largest / 4, largest / 2]

    def are_all(self, found: Trials) -> bool:
        """Whether these kept to the budget on all shares that :meth:`all` would try."""
        return found.shares[-1] == self._shares[-1]

    def first(self) -> Trials:
        """The same as :meth:`all`, for a way that has not run before.

        What a process has for ever after its first step (kernels that are loaded, layers whose form
        is known) would count as what a small graph takes.
        """
        if self._largest == 1:
            with suppress(*_NO_PART):
                self._run(1 / 16, 1.0)
        return self.all()

    def all(self) -> Trials:
        """The whole of a small graph, else a quarter and half of the largest share."""
        # As large as it may be and with blocks of the usual size, this one tells of time.
        trial = self._run(self._largest, 1.0)
        if self._largest == 1:
            return Trials(self._shares, [trial], trial.seconds)
        return self._cut_as(1.0, self._shares)._replace(seconds=trial.seconds / self._largest)

    def within(self, memory: int) -> Trials:
        """The same where the largest share keeps to the budget, else two shares that do.

        What a share takes tells where the next one may be.
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
            trial = self._run(share, _blocks(share))
            trials = [found.trials[-1], trial]
            found = Trials([found.shares[-1], share], trials, trial.seconds / share)

    def _cut_as(self, share: float, shares: Sequence[float]) -> Trials:
        """Smaller shares, cut into as many blocks as this one."""
        trials = [self._run(small, _blocks(small / share)) for small in shares]
        return Trials(shares, trials, trials[-1].seconds / shares[-1])


def _blocks(share: float) -> float:
    """Of the edges of a block, for this share of a graph."""
    return max(share, _LEAST_BLOCK)
