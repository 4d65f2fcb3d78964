"""Finds what a step would take in each way: it tries them on small graphs."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from torch import nn

from gact_graph.api.budget.estimate import Estimate
from gact_graph.api.budget.growth import Growth, Line
from gact_graph.api.budget.miniature import GraphSize, Miniature
from gact_graph.api.budget.trial import Subject, Trial
from gact_graph.api.budget.ways import EXACT, LEAST_BITS, MOST_BITS, STOCK, Way, quantizing, ways
from gact_graph.capture.config import Config
from gact_graph.support.heap import LEAST_RETURNED, returning_tensors

_EDGES = 1 << 17
"""Edges of the larger of the two graphs that are tried: some blocks of a layer in blocks."""

_NODES = 1 << 12
"""And its nodes at least: with fewer, what does not grow with the graph hides what does."""

_FILLED = 0.8
"""Of the budget, what a trial is to fill on a share of a graph that may not fit."""

_WORTH_IT = 1.25
"""How much larger the next share has to be."""


def estimate_call(
    model: nn.Module,
    method: str,
    inputs: tuple[Any, Any],
    config: Config,
    memory: int | None,
    nodes: int | None = None,
    edges: int | None = None,
) -> Estimate:
    """Tries each way on two small graphs and extends what they take to the whole.

    Args:
        model: The module.
        method: The method that is called in training.
        inputs: Its positional and named arguments.
        config: The settings that all ways share.
        memory: The budget in bytes.
        nodes: Of the graph that is meant, if it is not the one in the inputs.
        edges: Likewise.

    Raises:
        CannotShrink: No smaller graph can be made of the inputs.
    """
    miniature = Miniature(*inputs)
    given = miniature.size
    size = GraphSize(nodes or given.nodes, edges or given.edges)
    subject = Subject(model, method, config)
    largest = min(1.0, max(_EDGES / max(1, size.edges), _NODES / max(1, size.nodes)))

    @functools.cache
    def inputs_for(share: float) -> tuple[Any, Any]:
        """For this share of the graph that is meant."""
        if share == 1 and size == given:
            return inputs
        return miniature.shrunk(
            share * size.nodes / max(1, given.nodes), share * size.edges / max(1, given.edges)
        )

    def run(way: Way, share: float) -> Trial:
        return subject.run(way, inputs_for(share))

    with returning_tensors(LEAST_RETURNED):
        trials = {}
        for way in _tried(subject.device.type):
            runs = _Runs(functools.partial(run, way), largest)
            trials[way] = runs.all() if memory is None else runs.within(memory)
    grown = {way: found.growth for way, found in trials.items()}
    grown[STOCK] = replace(grown[STOCK], saved=trials[EXACT[1]].raw)
    return Estimate(_all_widths(grown, subject.device.type), size, memory)


class _Trials(NamedTuple):
    """What one way took on one or two shares of the graph."""

    shares: Sequence[float]
    trials: Sequence[Trial]

    @property
    def growth(self) -> Growth:
        return Growth(
            self._line([trial.peak_bytes for trial in self.trials]),
            self._line([trial.saved_bytes or 0 for trial in self.trials]),
            Line(0.0, self.trials[-1].seconds / self.shares[-1]),
        )

    @property
    def raw(self) -> Line:
        """What stock saves."""
        return self._line([trial.raw_bytes or 0 for trial in self.trials])

    def _line(self, values: Sequence[float]) -> Line:
        return Line.through(self.shares[0], values[0], self.shares[-1], values[-1])


class _Runs:
    """Chooses the shares of the graph on which a way is tried.

    Args:
        run: Tries it on a share.
        largest: The largest share: the whole of a small graph.
    """

    def __init__(self, run: Callable[[float], Trial], largest: float) -> None:
        self._run = run
        self._largest = largest

    def all(self) -> _Trials:
        """The whole, or the largest share and its half."""
        shares = [1.0] if self._largest == 1 else [self._largest / 2, self._largest]
        return _Trials(shares, [self._run(share) for share in shares])

    def within(self, memory: int) -> _Trials:
        """The same where a trial keeps to the budget, else the two largest that do.

        What a share takes tells where the next one may be. Blocks are as large in a small graph as
        in a large one, so with them the first shares tell of more than the whole will take.
        """
        shares = [self._largest / 16, self._largest / 8]
        try:
            trials = [self._run(share) for share in shares]
        except (IndexError, RuntimeError, ValueError):
            return self.all()  # the model may take the whole of a small graph, and no part of it
        while True:
            found = _Trials(shares[-2:], trials[-2:])
            peak = found.growth.peak.at(self._largest)
            if peak <= memory:
                return self.all()
            share = self._largest * _FILLED * memory / peak
            if share < shares[-1] * _WORTH_IT:
                return found
            shares.append(share)
            trials.append(self._run(share))


def _tried(device_type: str) -> list[Way]:
    coded = [Way(level, bits) for level in quantizing(device_type) for bits in (8, LEAST_BITS)]
    return [*EXACT, *coded]


def _all_widths(grown: dict[Way, Growth], device_type: str) -> dict[Way, Growth]:
    """With the widths between those that were tried."""
    found: dict[Way, Growth] = {}
    for way in ways(device_type):
        if way in grown:
            found[way] = grown[way]
            continue
        most, least = (grown[Way(way.level, bits)] for bits in (MOST_BITS, LEAST_BITS))
        found[way] = least.mixed(most, (way.bits - LEAST_BITS) / (MOST_BITS - LEAST_BITS))
    return found
