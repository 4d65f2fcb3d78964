"""The time that each level adds to a step: see gact_graph.api.budget.trials."""

from __future__ import annotations

import pytest
import torch
from torch_geometric.nn import GCN

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
