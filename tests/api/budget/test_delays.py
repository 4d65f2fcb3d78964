"""The time that strategies add to a step: see gact_graph.api.budget.trials."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch_geometric.nn import GCN

from gact_graph.api.budget import trials
from gact_graph.api.budget.estimate import BLOCKS, LEAST_BITS, Strategy
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
    """Return the time that a strategy adds to a step of one second, without its error."""
    search._find_cost(strategy)
    search._step_seconds = 1.0
    search._costs[strategy] = replace(search._costs[strategy], error=0.0)
    return search._price(strategy)


def test_blocks_add_nothing_and_layers_that_run_again_at_most_a_forward(search: Search) -> None:
    assert seconds(search, BLOCKS) == 0
    again = Strategy("CB2")
    trial = (search._find_cost(again), search.largest_trial(again))[1]
    assert 0 < trial.forward_seconds < trial.seconds
    assert seconds(search, again) == trial.forward_seconds / trial.share


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


def test_the_step_that_delays_are_shares_of_is_that_in_blocks(search: Search) -> None:
    search._find_cost(BLOCKS)
    assert 0 < search._step_seconds < 60
