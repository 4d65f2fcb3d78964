r"""The ladder of choices: for more and more memory, the widths with the least error.

For each budget :math:`B` on the ladder, an integer program chooses one width for each unit:

.. math::
    \min_x \sum_{u,w} e_{uw} x_{uw} \quad \text{subject to} \quad \sum_w x_{uw} = 1, \qquad
    f_k + \sum_{u,w} m_{kuw} x_{uw} \le B \ \text{ for each part } k \text{ of a step},

with the error :math:`e_{uw}` of the gradient and the bytes :math:`m_{kuw}` of
:class:`~gact_graph.api.budget.memory_model.MemoryModel`. It generalizes the program of GACT
(ICML 2022, section 4.1), whose only part is the end of forward. HiGHS solves it; if the time does
not suffice, a greedy search takes over, and the linear relaxation bounds how far it is from the
optimum.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from time import monotonic

import numpy as np
from numpy.typing import NDArray

from gact_graph.api.budget.integer_program import minimize
from gact_graph.api.budget.memory_model import MemoryModel

RUNGS = 24
"""The number of budgets on the ladder."""

_PATIENCE = 2.0
"""Seconds for all integer programs of a ladder."""

_TIE = 1e-6
"""The weight of the time beside the error, which decides between plans of equal error."""


@dataclass(frozen=True)
class Rung:
    """A choice of widths.

    Attributes:
        choices: The index of each unit's width.
        measures: Whether there is memory for steps that measure sensitivities, too.
        error: Expected squared error of the gradient, relative to the squared gradient.
        seconds: Time to encode and decode, in a step.
        least: A lower bound of the error in as much memory.
    """

    choices: tuple[int, ...]
    measures: bool
    error: float
    seconds: float
    least: float


@dataclass(frozen=True)
class Prices:
    """The costs of choices besides memory.

    Attributes:
        error: Expected squared error of the gradient, relative to its square, [units, widths].
        seconds: Time to encode and decode, [units, widths].
    """

    error: NDArray[np.float64]
    seconds: NDArray[np.float64]

    def of(self, choices: Sequence[int]) -> tuple[float, float]:
        """Return the error and the seconds of choices."""
        units = np.arange(len(self.error)), np.asarray(choices, dtype=int)
        return float(self.error[units].sum()), float(self.seconds[units].sum())


def ladder(model: MemoryModel, prices: Prices) -> list[Rung]:
    """Return the rungs from the least memory to the most; no rung has more error than the last.

    Args:
        model: The memory of a step that measures and of one that does not.
        prices: The costs of choices.
    """
    steady = model.steady()
    units = len(model.units)
    least, most = steady.peak([0] * units), model.peak([len(model.widths) - 1] * units)
    deadline = monotonic() + _PATIENCE
    rungs: list[Rung] = []
    for budget in np.geomspace(max(1.0, least), max(1.0, least, most), RUNGS):
        seconds = rungs[-1].seconds if rungs else np.inf
        found: list[Rung] = []
        for part in (model, steady):  # of equal error, the one that measures
            patience = max(0.05, deadline - monotonic())
            solution = _solved(part, prices, float(budget) * (1 + 1e-9), seconds, patience)
            if solution is not None:
                choices, bound = solution
                found.append(Rung(tuple(choices), part is model, *prices.of(choices), bound))
        if found and (not rungs or min(map(_error, found)) < rungs[-1].error):
            rungs.append(min(found, key=_error))
    return rungs


def _error(rung: Rung) -> float:
    return rung.error


def _solved(
    model: MemoryModel, prices: Prices, budget: float, most_seconds: float, patience: float
) -> tuple[list[int], float] | None:
    """Return choices and a lower bound of the error; None if nothing fits."""
    units, widths = prices.error.shape
    if model.peak([0] * units) > budget:
        return None
    parts = _tight(model, budget)
    rows = [np.kron(np.eye(units), np.ones(widths))]
    rows.append(model.chosen[parts].reshape(-1, units * widths) / budget)
    most = [np.ones(units), 1 - model.fixed[parts] / budget]
    if np.isfinite(most_seconds):
        scale = max(most_seconds, 1e-12)
        rows.append(prices.seconds.reshape(1, -1) / scale)
        most.append(np.array([most_seconds / scale * (1 + 1e-9)]))
    scale = max(float(prices.error.max(initial=0.0)), 1e-30)
    weight = _TIE / max(float(prices.seconds.max(initial=0.0)), 1e-30)
    cost = (prices.error / scale + weight * prices.seconds).ravel()
    found = minimize(cost, np.concatenate(rows), np.concatenate(most), units, patience)
    if found is None:
        return None
    values, least = found
    if values is None:
        return _greedy(model, prices, budget), max(0.0, least) * scale
    choices = values.reshape(units, widths).argmax(axis=1).tolist()
    return choices, prices.of(choices)[0]


def _tight(model: MemoryModel, budget: float) -> NDArray[np.bool_]:
    """Return the parts that some choices take beyond a budget."""
    most = model.fixed + model.chosen.max(axis=2).sum(axis=1)
    return np.asarray(most > budget)


def _greedy(model: MemoryModel, prices: Prices, budget: float) -> list[int]:
    """Widen one unit at a time, by the most error removed per byte of the peak, while it fits."""
    units, widths = prices.error.shape
    choices = [0] * units
    curve = model.curve(choices)
    while True:
        best: tuple[float, int, int] | None = None
        for unit, now in enumerate(choices):
            for width in range(now + 1, widths):
                more = model.chosen[:, unit, width] - model.chosen[:, unit, now]
                peak = float((curve + more).max(initial=0.0))
                removed = prices.error[unit, now] - prices.error[unit, width]
                if peak > budget or removed <= 0:
                    continue
                worth = removed / max(1.0, peak - float(curve.max(initial=0.0)))
                if best is None or worth > best[0]:
                    best = worth, unit, width
        if best is None:
            return choices
        _, unit, width = best
        curve = curve + model.chosen[:, unit, width] - model.chosen[:, unit, choices[unit]]
        choices[unit] = width
