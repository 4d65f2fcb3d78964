"""Strategies that keep some tensors exactly and others in codes, from trials of both alone."""

from __future__ import annotations

import functools
import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from time import perf_counter

import numpy as np
import torch

from gact_graph.adaptive.allocator import noise
from gact_graph.api.budget.estimate import LEAST_BITS, MOST_BITS, Cost, Line, Peak, Strategy
from gact_graph.api.budget.ladder import Prices, Rung, ladder
from gact_graph.api.budget.memory_model import EXACT, MemoryModel, Timeline, unit_of
from gact_graph.api.budget.steps import Trial
from gact_graph.ops.quantize import pack

_WIDTHS = (*range(LEAST_BITS, MOST_BITS + 1), EXACT)

_TIMED = 1 << 20
"""The number of elements that calibration encodes and decodes: beyond the caches of a core."""


@dataclass(frozen=True)
class Mixed:
    """The ladder of mixed strategies, with their memory on the whole graph and on a part.

    Attributes:
        coded: The strategy that quantizes all tensors.
        rungs: The choices, from the least memory to the most.
        whole: The memory of a step on the whole graph.
        part: The memory of a step on a part of the graph.
        share: The part, as a share of the graph.
        slots: The slots of each unit, with their numbers of elements on the part.
    """

    coded: Strategy
    rungs: Sequence[Rung]
    whole: MemoryModel
    part: MemoryModel
    share: float
    slots: Mapping[str, Mapping[str, float]]

    @classmethod
    def of(
        cls,
        exact: tuple[Trial, Trial],
        coded: tuple[Trial, Trial],
        strategy: Strategy,
        device: torch.device,
    ) -> Mixed | None:
        """Return the ladder; None if nothing was quantized or measured.

        Args:
            exact: The trials of a strategy without codes, on two parts of the graph.
            coded: The trials of a strategy that quantizes all tensors, likewise.
            strategy: The latter strategy.
            device: The device that encodes and decodes.
        """
        high = coded[1]
        counts: dict[str, dict[str, float]] = {}
        for step in high.steps:
            for name, row in step.rows.items():
                if row.bits is not None:
                    counts.setdefault(unit_of(name), {})[row.slot] = row.numel
        if not high.sensitivities or not counts:
            return None
        share = min(high.share, exact[1].share)  # on which trials of both keep to the budget
        whole, part = (
            MemoryModel.of(_timelines(exact, at), _timelines(coded, at), LEAST_BITS, _WIDTHS)
            for at in (1.0, share)
        )
        prices = _prices(whole, counts, high, seconds_of_element(device))
        exact_choices = (len(_WIDTHS) - 1,) * len(whole.units)  # the strategy without codes
        rungs = [rung for rung in ladder(whole, prices) if rung.choices != exact_choices]
        return cls(strategy, rungs, whole, part, share, counts)

    def strategy(self, index: int) -> Strategy:
        """Return the strategy of a rung."""
        rung = self.rungs[index]
        widths: dict[str, float] = {}
        coded: dict[float, float] = {}
        for unit, choice in zip(self.whole.units, rung.choices, strict=True):
            width = _WIDTHS[choice]
            for slot, count in self.slots[unit].items():
                widths[slot] = width
                if width != EXACT:
                    coded[width] = coded.get(width, 0.0) + count
        total = sum(coded.values())
        average = sum(w * n for w, n in coded.items()) / total if total else LEAST_BITS
        bits = math.floor(average * 4) / 4 if rung.measures else math.floor(average)
        return self.coded._replace(
            bits=bits, widths=tuple(sorted(widths.items())), measures=rung.measures
        )

    def corrected(self, index: int, trial: Trial) -> Cost:
        """Return the memory of a rung's step.

        Args:
            index: The rung.
            trial: A trial of its strategy on :attr:`part`, by which the model's peaks are scaled.
        """
        rung, (whole, part) = self.rungs[index], (self.whole, self.part)
        if not rung.measures:
            whole, part = whole.steady(), part.steady()
        factor = trial.peak / part.peak(rung.choices)
        curves = part.curve(rung.choices), whole.curve(rung.choices)
        peaks = [
            Peak(*end, Line.through(low, high, (self.share, 1.0)).times(factor))
            for end, low, high in zip(whole.ends, *curves, strict=True)
        ]
        return Cost(peaks, Line(0.0, trial.saved / trial.share), rung.error)


def _timelines(trials: tuple[Trial, Trial], share: float) -> list[Timeline]:
    low, high = trials
    shares = low.share, high.share
    return [
        Timeline.of(one, two, shares, share) for one, two in zip(low.steps, high.steps, strict=True)
    ]


def _prices(
    model: MemoryModel,
    counts: Mapping[str, Mapping[str, float]],
    trial: Trial,
    of_element: float,
) -> Prices:
    """Return the error and the time of each choice."""
    shape = len(model.units), len(_WIDTHS)
    error, seconds = np.zeros(shape), np.zeros(shape)
    for unit, name in enumerate(model.units):
        sensitivity = sum(trial.sensitivities.get(slot, 0.0) for slot in counts[name])
        elements = sum(counts[name].values()) / trial.share
        for place, width in enumerate(_WIDTHS):
            error[unit, place] = sensitivity * noise(width)
            seconds[unit, place] = 0.0 if width == EXACT else elements * of_element
    return Prices(error, seconds)


@functools.cache
def seconds_of_element(device: torch.device) -> float:
    """Return the seconds to encode and decode an element on a device, by a short trial."""
    x = torch.linspace(0, 1, _TIMED, device=device)  # draws no random numbers of the user's
    durations = []
    for _ in range(5):
        start = perf_counter()
        pack(x, 4).unpack()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        durations.append(perf_counter() - start)
    return statistics.median(durations) / _TIMED
