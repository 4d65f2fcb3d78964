"""Training with one seed: it learns, it repeats, and it records its costs."""

from __future__ import annotations

import random
from dataclasses import replace

import numpy as np
import pytest
import torch
from experiments_samples import small_graph

from experiments.helpers.data import NodeTask, layout_of, prepare
from experiments.helpers.recipes import MODELS, Recipe
from experiments.helpers.train import (
    Setup,
    cost_of_measuring,
    counts,
    seed_everything,
    train,
    training_step,
)
from experiments.models.nets import build

RECIPE = Recipe(layers=2, hidden=16, dropout=0.2, lr=0.02, epochs=30, heads=2)


def task_for(model: str, *, multi_label: bool = False) -> NodeTask:
    return prepare(small_graph(multi_label=multi_label), layout_of(model))


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize(("bits", "level"), [(32, "L0"), (8, "L1")])
def test_learns(model: str, bits: int, level: str) -> None:
    record = train(task_for(model), Setup(model, RECIPE, bits, level), seed=0)[0]
    assert record["loss"][-1] < 0.5 * record["loss"][0]
    assert record["test_score"] > 0.6  # a guess has 0.33


@pytest.mark.parametrize("model", MODELS)
def test_learns_several_labels(model: str) -> None:
    task = task_for(model, multi_label=True)
    record = train(task, Setup(model, RECIPE, 32, "L0"), seed=0)[0]
    assert record["loss"][-1] < 0.6 * record["loss"][0]
    assert record["test_score"] > 0.7


@pytest.mark.parametrize("model", MODELS)
def test_same_seed_gives_the_same_numbers(model: str) -> None:
    task, setup = task_for(model), Setup(model, replace(RECIPE, epochs=5), 4, "L1")

    def numbers(seed: int) -> list[float]:
        record = train(task, setup, seed)[0]
        return [*record["loss"], *record["val_curve"], record["test_score"]]

    first = numbers(0)
    torch.rand(3), random.random(), np.random.rand()  # whatever was drawn in between
    assert numbers(0) == first
    assert numbers(1) != first


def test_step_trains_in_training_mode_on_training_nodes() -> None:
    task = task_for("gcn")
    model = build("gcn", replace(RECIPE, dropout=0.0), 3, 3)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    model.train()
    with torch.no_grad():
        logits = model(task.x, task.adjacency)
        expected = torch.nn.functional.cross_entropy(logits[:30], task.y[:30])
    model.eval()
    before = model.convs[0].lin.weight.detach().clone()
    loss = training_step(model, optimizer, task)
    assert model.training
    assert not loss.requires_grad
    torch.testing.assert_close(loss, expected)
    assert not torch.equal(model.convs[0].lin.weight, before)


def test_record() -> None:
    seen: list[tuple[int, float, float, int | None]] = []
    setup = Setup("gcn", replace(RECIPE, epochs=6), 32, "L0")
    record, report = train(task_for("gcn"), setup, 3, lambda *epoch: seen.append(epoch))
    assert record["seed"] == 3
    assert [epoch for epoch, *_ in seen] == [1, 2, 3, 4, 5, 6]
    assert [loss for _, loss, *_ in seen] == record["loss"]
    assert [score for *_, score, _ in seen] == record["val_curve"]
    assert record["val_score"] == max(record["val_curve"])
    assert record["best_epoch"] == record["val_curve"].index(record["val_score"]) + 1
    assert record["epoch_seconds"] > 0
    memory = report.to_dict()
    for key in ("rate", "raw_bytes", "stored_bytes", "average_bits", "contexts"):
        assert record[key] == memory[key]
    assert record["raw_bytes"] == record["stored_bytes"] > 0
    assert record["rate"] == 1.0


def test_accuracy() -> None:
    logits = torch.tensor([[2.0, 1.0], [0.0, 3.0], [5.0, 4.0], [0.0, 0.1]])
    assert counts(logits, torch.tensor([0, 1, 1, 1])).tolist() == [3, 4]


def test_micro_f1() -> None:
    logits = torch.tensor([[1.0, -1.0, 2.0], [-1.0, 3.0, -1.0]])
    y = torch.tensor([[1.0, 1.0, 0.0], [0.0, 1.0, 0.0]])
    assert counts(logits, y).tolist() == [2 * 2, 3 + 3]  # 2 hits; 3 predicted, 3 actual
    assert counts(-torch.ones(2, 3), torch.zeros(2, 3)).tolist() == [0, 0]


def test_every_generator_is_seeded() -> None:
    def draw() -> tuple[float, float, float]:
        seed_everything(5)
        return random.random(), float(np.random.rand()), float(torch.rand(()))

    assert draw() == draw()


def test_steps_that_measured_are_set_against_the_others() -> None:
    seconds, passes = [9.0, 2.0, 3.0, 7.0, 2.0, 4.0, 6.0, 2.0], [0, 0, 1, 3, 3, 4, 6, 6]
    assert cost_of_measuring(seconds, passes) == {
        "step_seconds": 2.0,
        "first_measurement_steps": pytest.approx(0.5 + 2.5),
        "measuring_steps": pytest.approx(0.5 + 2.5 + 1 + 2),
    }


def test_nothing_was_measured() -> None:
    costs = cost_of_measuring([2.0, 1.0, 1.0], [0, 0, 0])
    assert costs == {"step_seconds": 1.0, "first_measurement_steps": 0, "measuring_steps": 0.0}


def test_nothing_is_known_where_every_step_measured() -> None:
    assert cost_of_measuring([1.0, 2.0], [1, 3]) == {}
