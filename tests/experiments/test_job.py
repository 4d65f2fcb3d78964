"""The seeds of one configuration: missing ones train, finished ones stay."""

from __future__ import annotations

import io
import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from experiments_samples import small_graph
from rich.console import Console

from experiments.helpers import job as job_module
from experiments.helpers.data import prepare
from experiments.helpers.errors import ResultsError
from experiments.helpers.job import Job, configuration, run
from experiments.helpers.recipes import Recipe
from experiments.helpers.train import Setup

RECIPE = Recipe(layers=2, hidden=8, dropout=0.5, lr=0.01, epochs=2)


def make_job(out: Path | None, seeds: tuple[int, ...] = (0,)) -> Job:
    graph = small_graph()
    setup = Setup("gcn", RECIPE, 32, "L0")
    return Job(setup, "small.npz", graph, prepare(graph, "csr"), seeds, out)


def quiet() -> Console:
    return Console(file=io.StringIO(), width=100)


def test_configuration_holds_what_changes_numbers(tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    config = configuration(make_job(None))
    assert config["dataset"] == str(tmp_path / "small.npz")
    assert (config["nodes"], config["edges"], config["features"]) == (60, 150, 3)
    assert (config["model"], config["bits"], config["level"]) == ("gcn", 32, "L0")
    assert (config["lr"], config["epochs"], config["hidden"]) == (0.01, 2, 8)
    assert (config["device"], config["threads"]) == ("cpu", torch.get_num_threads())
    assert config["adaptive"] is False
    assert "seeds" not in config
    assert json.loads(json.dumps(config)) == config


def test_goes_on_with_the_missing_seeds(tmp_path: Path, monkeypatch) -> None:
    first, report = run(make_job(tmp_path, (0, 2)), quiet())
    assert [entry["seed"] for entry in first["runs"]] == [0, 2]
    assert report is not None
    trained = []
    real = job_module.train

    def spy(task, setup, seed, on_epoch):
        trained.append(seed)
        return real(task, setup, seed, on_epoch)

    monkeypatch.setattr(job_module, "train", spy)
    console = quiet()
    second, _ = run(make_job(tmp_path, (0, 1, 2)), console)
    assert trained == [1]
    assert "2 of 3 seeds are in" in console.file.getvalue()
    assert [second["runs"][0], second["runs"][2]] == first["runs"]
    assert run(make_job(tmp_path, (0, 1, 2)), quiet())[1] is None
    assert trained == [1]


def test_interruption_keeps_the_seeds_that_are_done(tmp_path: Path, monkeypatch) -> None:
    real = job_module.train

    def interrupted(task, setup, seed, on_epoch):
        if seed == 1:
            raise KeyboardInterrupt
        return real(task, setup, seed, on_epoch)

    monkeypatch.setattr(job_module, "train", interrupted)
    with pytest.raises(KeyboardInterrupt):
        run(make_job(tmp_path, (0, 1)), quiet())
    content = json.loads((tmp_path / "result.json").read_text())
    assert [entry["seed"] for entry in content["runs"]] == [0]
    assert {path.name for path in tmp_path.iterdir()} == {"result.json", "report.md", "curves.png"}


def test_another_configuration_is_refused_before_training(tmp_path: Path, monkeypatch) -> None:
    run(make_job(tmp_path), quiet())
    before = (tmp_path / "result.json").read_bytes()
    other = make_job(tmp_path)
    other = replace(other, setup=replace(other.setup, recipe=replace(RECIPE, hidden=4)))
    with pytest.raises(ResultsError, match="got hidden 8 instead of 4"):
        run(other, quiet())
    assert (tmp_path / "result.json").read_bytes() == before


def test_missing_report_is_made_again(tmp_path: Path) -> None:
    run(make_job(tmp_path), quiet())
    (tmp_path / "report.md").unlink()
    (tmp_path / "curves.png").unlink()
    run(make_job(tmp_path), quiet())
    assert (tmp_path / "report.md").exists()
    assert (tmp_path / "curves.png").exists()
