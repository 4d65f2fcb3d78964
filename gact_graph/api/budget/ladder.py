r"""The ladder of choices: for more and more memory, the forms of saved tensors that cost least.

For each budget :math:`B` on the ladder, an integer program chooses one form for each unit:

.. math::
    \min_x \sum_{u,f} (t_{uf} + \lambda e_{uf}) x_{uf} \quad \text{subject to} \quad
    \sum_f x_{uf} = 1, \qquad
    F_k + \sum_{u,f} m_{kuf} x_{uf} \le B \ \text{ for each part } k \text{ of a step},
    \qquad x_u \text{ exact} \Rightarrow x_v \text{ exact for the sources } v \text{ of } u,

with the time :math:`t_{uf}`, the error of the gradient :math:`e_{uf}`, its weight :math:`\lambda`,
and the bytes :math:`m_{kuf}` of :class:`~gact_graph.api.budget.memory_model.MemoryModel`. It
generalizes the program of GACT (ICML 2022, section 4.1), whose only part is the end of forward and
whose only cost is the error. HiGHS solves it; if the time does not suffice, a greedy search takes
over.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from time import monotonic

import numpy as np
from numpy.typing import NDArray

from gact_graph.api.budget.integer_program import minimize
from gact_graph.api.budget.memory_model import EXACT, MemoryModel

RUNGS = 24
"""The number of budgets on the ladder."""

_PATIENCE = 2.0
"""Seconds for all integer programs of a ladder."""


@dataclass(frozen=True)
class Rung:
    """A choice of forms.

    Attributes:
        choices: The index of each unit's form.
        measures: Whether there is memory for steps that measure sensitivities, too.
        error: Expected squared error of the gradient, relative to the squared gradient.
        cost: The time to encode, decode and offload, and the error, in seconds.
    """

    choices: tuple[int, ...]
    measures: bool
    error: float
    cost: float


@dataclass(frozen=True)
class Prices:
    """The costs of choices besides memory.

    Attributes:
        error: Expected squared error of the gradient, relative to its square, [units, forms].
        seconds: Time to encode, decode and offload, [units, forms].
        weight: The seconds that count as much as an error of 1.
    """

    error: NDArray[np.float64]
    seconds: NDArray[np.float64]
    weight: float

    @property
    def cost(self) -> NDArray[np.float64]:
        """The time and the error of each choice in seconds, [units, forms]."""
        return self.seconds + self.weight * self.error

    def of(self, choices: Sequence[int]) -> tuple[float, float]:
        """Return the error and the cost of choices."""
        units = np.arange(len(self.error)), np.asarray(choices, dtype=int)
        return float(self.error[units].sum()), float(self.cost[units].sum())


def ladder(model: MemoryModel, prices: Prices) -> list[Rung]:
    """Return the rungs from the least memory to the most; each costs less than those before.

    Args:
        model: The memory of a step that measures and of one that does not.
        prices: The costs of choices.
    """
    steady = model.steady()
    least, most = steady.peak(_smallest(steady)), model.peak(_uniform(model, len(model.forms) - 1))
    deadline = monotonic() + _PATIENCE
    rungs: list[Rung] = []
    for budget in np.geomspace(max(1.0, least), max(1.0, least, most), RUNGS):
        found: list[Rung] = []
        for part in (model, steady):  # of equal cost, the one that measures
            patience = max(0.05, deadline - monotonic())
            choices = _solved(part, prices, float(budget) * (1 + 1e-9), patience)
            if choices is not None:
                found.append(Rung(tuple(choices), part is model, *prices.of(choices)))
        if found and (not rungs or min(map(_cost, found)) < rungs[-1].cost):
            rungs.append(min(found, key=_cost))
    return rungs


def _cost(rung: Rung) -> float:
    return rung.cost


def _uniform(model: MemoryModel, form: int) -> list[int]:
    """Return the same form for all units."""
    return [form] * len(model.units)


def _smallest(model: MemoryModel) -> list[int]:
    """Return the form for all units that takes the least memory."""
    return min((_uniform(model, form) for form in range(len(model.forms))), key=model.peak)


def _solved(model: MemoryModel, prices: Prices, budget: float, patience: float) -> list[int] | None:
    """Return the choices that cost least; None if nothing fits."""
    units, forms = prices.error.shape
    parts = _tight(model, budget)
    rows = [np.kron(np.eye(units), np.ones(forms))]
    rows.append(model.chosen[parts].reshape(-1, units * forms) / budget)
    most = [np.ones(units), 1 - model.fixed[parts] / budget]
    if model.needs:
        is_exact = np.array([form.bits == EXACT for form in model.forms], dtype=float)
        unit, source = np.eye(units)[np.transpose(model.needs)]
        rows.append(np.kron(unit, is_exact) + np.kron(source, 1 - is_exact))
        most.append(np.ones(len(model.needs)))
    cost = prices.cost.ravel()
    scale = max(float(cost.max(initial=0.0)), 1e-30)
    found = minimize(cost / scale, np.concatenate(rows), np.concatenate(most), units, patience)
    if found is None:
        return _greedy(model, prices, budget)
    choices: list[int] = found.reshape(units, forms).argmax(axis=1).tolist()
    return choices


def _tight(model: MemoryModel, budget: float) -> NDArray[np.bool_]:
    """Return the parts that some choices take beyond a budget."""
    most = model.fixed + model.chosen.max(axis=2).sum(axis=1)
    return np.asarray(most > budget)


def _greedy(model: MemoryModel, prices: Prices, budget: float) -> list[int] | None:
    """Change one unit at a time, by the most cost removed per byte of the peak, while it fits."""
    cost, choices = prices.cost, _smallest(model)
    curve = model.curve(choices)
    if curve.max(initial=0.0) > budget:
        return None
    while True:
        best: tuple[float, int, int] | None = None
        for unit, now in enumerate(choices):
            for form in range(len(model.forms)):
                more = model.chosen[:, unit, form] - model.chosen[:, unit, now]
                peak = float((curve + more).max(initial=0.0))
                removed = cost[unit, now] - cost[unit, form]
                changed = [*choices[:unit], form, *choices[unit + 1 :]]
                if peak > budget or removed <= 0 or not model.allows(changed):
                    continue
                worth = removed / max(1.0, peak - float(curve.max(initial=0.0)))
                if best is None or worth > best[0]:
                    best = worth, unit, form
        if best is None:
            return choices
        _, unit, form = best
        curve = curve + model.chosen[:, unit, form] - model.chosen[:, unit, choices[unit]]
        choices[unit] = form
