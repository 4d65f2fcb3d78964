"""A training that cannot fit into memory is refused before it starts."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from experiments_samples import small_graph

from experiments.helpers import fit
from experiments.helpers.errors import UsageError
from experiments.helpers.recipes import MODELS, Recipe
from experiments.helpers.train import Setup
from experiments.models.nets import build

GRAPH = small_graph()
CPU = torch.device("cpu")


def setup(model: str, **changes: object) -> Setup:
    recipe = replace(Recipe(3, 16, 0.5, 0.01, 10, batch_norm=False), **changes)
    return Setup(model, recipe, 4, "L1", blocks=False)


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("layers", [1, 2, 3, 6])
def test_the_number_of_weights_is_that_of_the_model(model: str, layers: int) -> None:
    recipe = setup(model, layers=layers, heads=3 if model == "gat" else 1).recipe
    weights = [p.numel() for p in build(model, recipe, 5, 7).parameters() if p.dim() == 2]
    assert fit.parameters(model, recipe, 5, 7) == sum(weights)


@pytest.mark.parametrize(
    ("model", "changes", "part"),
    [
        ("gcn", {"hidden": 10**9}, "one layer 240.0 GB"),
        ("gcnii", {"layers": 10**9}, "parameters 8.1 TB"),
        ("gat", {"heads": 10**9}, "messages 9.6 TB"),
    ],
)
def test_too_large_a_training_is_refused_with_the_numbers(model, changes, part) -> None:
    with pytest.raises(
        UsageError, match=rf"memory that are free on cpu .*{part}.*: give"
    ) as caught:
        fit.check_fits(GRAPH, setup(model, **changes), CPU)
    assert caught.value.exit_code == 2
    assert "graph" not in str(caught.value).split("(got")[1]  # on the CPU it is there already


def test_blocks_spare_the_messages(monkeypatch) -> None:
    wide = setup("gat", hidden=1000)
    monkeypatch.setattr(fit, "available_bytes", lambda: sum(fit.least_bytes(GRAPH, wide).values()))
    fit.check_fits(GRAPH, wide, CPU)
    without = fit.least_bytes(GRAPH, replace(wide, blocks="auto"))
    assert fit.least_bytes(GRAPH, wide).keys() - without.keys() == {"messages"}
    monkeypatch.setattr(fit, "available_bytes", lambda: sum(without.values()))
    with pytest.raises(UsageError, match="or --blocks auto"):
        fit.check_fits(GRAPH, wide, CPU)
    fit.check_fits(GRAPH, replace(wide, blocks="auto"), CPU)
    fit.check_fits(GRAPH, replace(wide, level="CB2", blocks=None), CPU)


def test_where_memory_is_unknown_nothing_is_refused(monkeypatch) -> None:
    monkeypatch.setattr(fit, "available_bytes", lambda: None)
    fit.check_fits(GRAPH, setup("gcn", hidden=10**9), CPU)


def test_on_cuda_the_graph_counts_too(monkeypatch) -> None:
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (100, 10**12))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: 30)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: 10)
    with pytest.raises(UsageError, match=r"the 120 B of memory that are free on cuda .*: graph "):
        fit.check_fits(GRAPH, setup("gcn"), torch.device("cuda"))
