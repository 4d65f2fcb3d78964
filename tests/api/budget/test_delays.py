"""The time that each level adds to a step: see gact_graph.api.budget.trials."""

from __future__ import annotations

import math

import pytest
import torch
from torch_geometric.nn import GCN

from gact_graph.api.budget import trials
from gact_graph.api.budget.estimate import BLOCKS, Strategy
from gact_graph.api.budget.trials import Search
from gact_graph.capture.config import Config


@pytest.fixture
def search() -> Search:
    inputs = torch.randn(4000, 32), torch.randint(4000, (2, 20_000))
    return Search(GCN(32, 32, 3, 8), "forward", (inputs, {}), Config(), 1 << 40, prefer="time")


def delay(search: Search, strategy: Strategy) -> float:
    search._find_cost(strategy)
    return search._delay_of_level(strategy)


def test_blocks_add_nothing_and_layers_that_run_again_at_most_a_forward(search: Search) -> None:
    assert delay(search, BLOCKS) == 0
    again = Strategy("CB2")
    assert 0 < delay(search, again) < 1
    trial = search.largest_trial(again)
    assert 0 < trial.forward_seconds < trial.seconds


def test_offloading_takes_as_long_as_its_bytes(
    search: Search, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trials, "seconds_of_byte", lambda device, nbytes: 1e-6)
    slow = delay(search, Strategy("L2"))
    monkeypatch.setattr(trials, "seconds_of_byte", lambda device, nbytes: 1e-9)
    assert slow > 0 and delay(search, Strategy("L2")) == pytest.approx(slow / 1000)
    monkeypatch.setattr(trials, "seconds_of_byte", lambda device, nbytes: None)
    assert delay(search, Strategy("L2")) == math.inf
