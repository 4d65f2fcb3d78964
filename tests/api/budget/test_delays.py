"""The time that strategies add to a step: see gact_graph.api.budget.trials."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from torch_geometric.nn import GCN

from gact_graph.api.budget import trials
from gact_graph.api.budget.estimate import BLOCKS, LEAST_BITS, STOCK, Strategy
from gact_graph.api.budget.trials import Search
from gact_graph.capture.config import Config

_OF_ELEMENT, _OF_BYTE = 1.0, 1000.0


@pytest.fixture
def search(monkeypatch: pytest.MonkeyPatch) -> Search:
    monkeypatch.setattr(trials, "seconds_of_element", lambda device: _OF_ELEMENT)
    monkeypatch.setattr(trials, "seconds_of_byte", lambda device, nbytes: _OF_BYTE)
    inputs = torch.randn(40_000, 256), torch.randint(40_000, (2, 80_000))
    return Search(GCN(256, 256, 3, 8), "forward", (inputs, {}), Config(), 1 << 40, prefer="time")


def seconds(search: Search, strategy: Strategy) -> float:
    """Return the time that a strategy adds to a step of one second."""
    search._find_cost(strategy)
    search._seconds[BLOCKS] = 1.0
    return search.seconds_of(strategy) - 1


def test_blocks_add_nothing_and_layers_that_run_again_at_most_a_forward(search: Search) -> None:
    assert seconds(search, BLOCKS) == 0
    again = Strategy("CB2")
    trial = (search._find_cost(again), search.largest_trial(again))[1]
    assert 0 < trial.forward_seconds < trial.seconds
    assert seconds(search, again) == pytest.approx(trial.forward_seconds / trial.share)


def test_codes_take_time_by_elements(search: Search) -> None:
    coded = Strategy("L1", LEAST_BITS)
    added, trial = seconds(search, coded), search.largest_trial(coded)
    assert trial.coded > 0
    assert added == pytest.approx(trial.coded / trial.share * _OF_ELEMENT)


def test_offloading_takes_time_by_the_bytes_of_the_form(search: Search) -> None:
    exact, coded = Strategy("L2"), Strategy("L2", LEAST_BITS)
    added, trial = seconds(search, exact), search.largest_trial(exact)
    assert added == pytest.approx(trial.contexts.host_bytes / trial.share * _OF_BYTE) != 0
    fewer, trial = seconds(search, coded), search.largest_trial(coded)
    of_codes = trial.coded / trial.share * _OF_ELEMENT
    away = trial.contexts.host_bytes / trial.share * _OF_BYTE
    assert fewer == pytest.approx(of_codes + away) and away < added / 4


def test_files_in_memory_are_the_last_resort(
    search: Search, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trials, "seconds_of_byte", lambda device, nbytes: None)
    for strategy in (BLOCKS, Strategy("L2"), Strategy("CB2")):
        search._find_cost(strategy)
        assert math.isinf(search._price(strategy)) == (strategy.level == "L2")
        assert math.isfinite(search.seconds_of(strategy))


def test_time_and_error_add_up_in_steps(search: Search) -> None:
    coded = Strategy("L1", LEAST_BITS)
    added = seconds(search, coded)
    search._seconds[BLOCKS] = 4.0
    search._costs[coded] = replace(search._costs[coded], error=0.02)
    assert search._price(coded) == pytest.approx(added / 4 + 10 * 0.02)
    assert search._price(coded) == pytest.approx(search.seconds_of(coded) / 4 - 1 + 0.2)


def test_steps_of_exact_strategies_take_the_time_of_their_own_trials(search: Search) -> None:
    for strategy in (STOCK, BLOCKS):
        search._find_cost(strategy)
        assert 0 < search.largest_trial(strategy).seconds <= search.seconds_of(strategy) * 1.001


def test_the_pace_of_real_steps_scales_those_of_trials() -> None:
    inputs = torch.randn(400, 8), torch.randint(400, (2, 800))
    model, found = GCN(8, 8, 2, 2), []
    for pace in (1.0, 1000.0):
        search = Search(model, "forward", (inputs, {}), Config(), 1 << 40, prefer="time", pace=pace)
        search._find_cost(BLOCKS)
        found.append(search.seconds_of(BLOCKS))
    assert found[1] > 50 * found[0]
