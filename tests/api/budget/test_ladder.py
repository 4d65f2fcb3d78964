"""The ladder of choices, against an exhaustive search."""

from __future__ import annotations

import itertools
import sys
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gact_graph.api.budget import ladder as ladders
from gact_graph.api.budget.integer_program import minimize
from gact_graph.api.budget.ladder import Prices, ladder
from gact_graph.api.budget.memory_model import Form, MemoryModel

FORMS = Form(2), Form(4), Form(32, offloaded=True), Form(32)
MEMORY = np.array([2.0, 4.0, 0.0, 32.0])
NOISE = np.array([1 / 9, 1 / 225, 0, 0])
SECONDS = np.array([1.0, 1.0, 8.0, 0.0])


def problem(seed: int, units: int, parts: int) -> tuple[MemoryModel, Prices]:
    """Random memory, larger for wider codes, and errors, smaller for these."""
    random = np.random.default_rng(seed)
    sizes = random.integers(1, 1000, (2 * parts, units, 1)) * random.integers(
        0, 2, (2 * parts, units, 1)
    )
    model = MemoryModel(
        tuple(f"unit {unit}" for unit in range(units)),
        FORMS,
        random.integers(0, 500, 2 * parts).astype(float),
        sizes * MEMORY,
        np.repeat([True, False], parts),
        [(f"context {part}", False) for part in range(2 * parts)],
    )
    pairs = random.integers(0, units, (units // 2, 2))
    model = replace(model, needs=[(int(a), int(b)) for a, b in pairs if a != b])
    error = random.random((units, 1)) * NOISE
    return model, Prices(error, np.ones((units, 1)) * SECONDS, weight=100.0)


def least_cost(model: MemoryModel, prices: Prices, budget: float) -> float:
    """The least cost of all choices within a budget, one by one."""
    every = itertools.product(range(len(FORMS)), repeat=len(model.units))
    return min(prices.of(c)[1] for c in every if model.allows(c) and model.peak(c) <= budget)


@given(st.integers(0, 10**6), st.integers(1, 5), st.integers(1, 6))
@settings(max_examples=40, deadline=None)
def test_no_choice_in_as_much_memory_costs_less(seed: int, units: int, parts: int) -> None:
    model, prices = problem(seed, units, parts)
    for rung in ladder(model, prices):
        memory = model if rung.measures else model.steady()
        budget = memory.peak(rung.choices)
        assert model.allows(rung.choices)
        assert rung.cost <= least_cost(memory, prices, budget) * (1 + 1e-6) + 1e-9


@pytest.mark.parametrize("seed", range(5))
def test_more_memory_means_less_cost(seed: int) -> None:
    model, prices = problem(seed, 12, 8)
    rungs = ladder(model, prices)
    costs = [rung.cost for rung in rungs]
    assert len(rungs) > 3 and costs == sorted(costs, reverse=True)
    assert rungs[-1].cost == 0
    assert any(2 in rung.choices for rung in rungs)


def test_the_weight_of_the_error_decides_between_codes_and_slow_exact_forms() -> None:
    model, prices = problem(3, 8, 8)
    light, heavy = (
        ladder(model, Prices(prices.error, prices.seconds, weight)) for weight in (1e-3, 1e6)
    )
    exact = {FORMS.index(Form(32, offloaded=True)), FORMS.index(Form(32))}
    assert any(not exact.issuperset(rung.choices) for rung in light)
    assert all(exact.issuperset(rung.choices) for rung in heavy)


@pytest.mark.parametrize("seed", range(5))
def test_without_time_a_greedy_search_takes_over(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, prices = problem(seed, 5, 6)
    exact = ladder(model, prices)
    monkeypatch.setattr(ladders, "minimize", lambda *args: None)
    greedy = ladder(model, prices)
    costs = [rung.cost for rung in greedy]
    assert costs == sorted(costs, reverse=True)
    for rung in greedy:
        assert model.allows(rung.choices)
    assert greedy[-1].cost == exact[-1].cost == 0


def test_without_the_solver_there_is_no_optimum(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "highspy", None)
    assert minimize(np.ones(2), np.ones((1, 2)), np.ones(1), 1, 1.0) is None
    model, prices = problem(0, 5, 6)
    assert ladder(model, prices)[-1].cost == 0


def test_a_program_without_solution_and_one_with_too_little_time() -> None:
    ones = np.ones((2, 2))
    assert minimize(np.ones(2), ones, np.array([1.0, 0.0]), 1, 1.0) is None
    found = minimize(np.array([3.0, 2.0]), ones[:1], np.array([1.0]), 1, 1.0)
    assert found is not None and found.tolist() == [0, 1]
