"""Strategies with a form for each tensor, from trials with all tensors exact, or all in codes."""

from __future__ import annotations

import functools
import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from gact_graph.adaptive.allocator import noise
from gact_graph.api.budget.estimate import LEAST_BITS, MOST_BITS, Cost, Line, Peak, Strategy
from gact_graph.api.budget.ladder import Prices, Rung, ladder
from gact_graph.api.budget.memory_model import EXACT, Form, MemoryModel, Timeline, unit_of
from gact_graph.api.budget.steps import Trial
from gact_graph.capture.config import Config
from gact_graph.codecs.offload.speed import seconds_of_byte
from gact_graph.codecs.offload.swap import LEAST_BYTES
from gact_graph.ops.quantize import pack
from gact_graph.support.clock import seconds_on

_OFFLOADED = Form(MOST_BITS, offloaded=True), Form(EXACT, offloaded=True)

_TIMED = 1 << 20
"""The number of elements that calibration encodes and decodes: beyond the caches of a core."""


@dataclass(frozen=True)
class Mixed:
    """The ladder of mixed strategies, with their memory on the whole graph and on a part.

    Attributes:
        exact: The strategy without codes.
        coded: The strategy that quantizes all tensors.
        rungs: The choices, from the least memory to the most.
        whole: The memory of a step on the whole graph.
        part: The memory of a step on a part of the graph.
        share: The part, as a share of the graph.
        slots: The slots of each unit, with their numbers of elements on the part.
    """

    exact: Strategy
    coded: Strategy
    rungs: Sequence[Rung]
    whole: MemoryModel
    part: MemoryModel
    share: float
    slots: Mapping[str, Mapping[str, float]]

    @classmethod
    def of(
        cls,
        exact: tuple[Strategy, tuple[Trial, Trial]],
        coded: tuple[Strategy, tuple[Trial, Trial]],
        weight: float,
        device: torch.device,
    ) -> Mixed | None:
        """Return the ladder; None if nothing was quantized or measured.

        Args:
            exact: A strategy without codes, and its trials on two parts of the graph.
            coded: A strategy that quantizes all tensors, and its trials.
            weight: The seconds that count as much as an error of 1.
            device: The device that encodes, decodes and offloads.
        """
        without, pair = exact[1], coded[1]
        high = pair[1]
        counts: dict[str, dict[str, float]] = {}
        for step in high.steps:
            for name, row in step.rows.items():
                if row.bits is not None:
                    counts.setdefault(unit_of(name), {})[row.slot] = row.numel
        if not high.sensitivities or not counts:
            return None
        share = min(high.share, without[1].share)  # on which trials of both keep to the budget
        elements = sum(sum(of_unit.values()) for of_unit in counts.values()) / high.share
        offload = seconds_of_byte(device, elements * EXACT / 8)
        forms = [Form(bits) for bits in range(LEAST_BITS, MOST_BITS + 1)]
        swaps = exact[0].config(Config()).swap  # a level that offloads each form
        forms += [*(() if swaps or offload is None else _OFFLOADED), Form(EXACT)]
        whole, part = (
            MemoryModel.of(
                *(_timelines(without, at), _timelines(pair, at), LEAST_BITS, forms),
                least=LEAST_BYTES * at,
            )
            for at in (1.0, share)
        )
        of_element, of_byte = seconds_of_element(device), offload or 0.0
        prices = _prices(whole, counts, high, of_element, of_byte, swaps, weight)
        on_device = (len(forms) - 1,) * len(whole.units)  # the strategy without codes
        rungs = [rung for rung in ladder(whole, prices) if rung.choices != on_device]
        return cls(exact[0], coded[0], rungs, whole, part, share, counts)

    def strategy(self, index: int) -> Strategy:
        """Return the strategy of a rung."""
        rung = self.rungs[index]
        widths: dict[str, float] = {}
        coded: dict[float, float] = {}
        away: list[str] = []
        for unit, choice in zip(self.whole.units, rung.choices, strict=True):
            form = self.whole.forms[choice]
            for slot, count in self.slots[unit].items():
                widths[slot] = form.bits
                if form.bits != EXACT:
                    coded[form.bits] = coded.get(form.bits, 0.0) + count
            away += [*self.slots[unit]] if form.offloaded else []
        offloaded = tuple(sorted(away))
        total = sum(coded.values())
        if not total:
            return self.exact._replace(offloaded=offloaded)
        average = sum(w * n for w, n in coded.items()) / total
        bits = math.floor(average * 4) / 4 if rung.measures else math.floor(average)
        return self.coded._replace(
            bits=bits,
            widths=tuple(sorted(widths.items())),
            measures=rung.measures,
            offloaded=offloaded,
        )

    def corrected(self, index: int, trial: Trial) -> Cost:
        """Return the memory of a rung's step.

        Args:
            index: The rung.
            trial: A trial of its strategy on :attr:`part`, by which the model's peaks are scaled.
        """
        rung, (whole, part) = self.rungs[index], (self.whole, self.part)
        if not rung.measures or self.strategy(index).bits == EXACT:
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
    of_byte: float,
    swaps: bool,
    weight: float,
) -> Prices:
    """Return the error and the time of each choice.

    Args:
        model: The units and their forms.
        counts: The slots of each unit, with their numbers of elements in the trial.
        trial: The trial that measured the sensitivities.
        of_element: The seconds to encode and decode an element.
        of_byte: The seconds to offload and to fetch a byte.
        swaps: Whether all forms are offloaded.
        weight: The seconds that count as much as an error of 1.
    """
    shape = len(model.units), len(model.forms)
    error, seconds = np.zeros(shape), np.zeros(shape)
    for unit, name in enumerate(model.units):
        sensitivity = sum(trial.sensitivities.get(slot, 0.0) for slot in counts[name])
        elements = sum(counts[name].values()) / trial.share
        for place, form in enumerate(model.forms):
            error[unit, place] = sensitivity * noise(form.bits)
            seconds[unit, place] = 0.0 if form.bits == EXACT else elements * of_element
            if swaps or form.offloaded:
                seconds[unit, place] += elements * form.bits / 8 * of_byte
    return Prices(error, seconds, weight)


@functools.cache
def seconds_of_element(device: torch.device) -> float:
    """Return the seconds to encode and decode an element on a device, by a short trial."""
    x = torch.linspace(0, 1, _TIMED, device=device)  # draws no random numbers of the user's
    durations = []
    for _ in range(5):
        start = seconds_on(device)
        pack(x, 4).unpack()
        durations.append(seconds_on(device) - start)
    return statistics.median(durations) / _TIMED
