"""Accuracy by the seconds of training: curves, the size of batches, and the table."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from experiments_samples import small_graph

from experiments import time_to_accuracy
from experiments.helpers.sampling import BATCHES
from experiments.save_graph import save
from experiments.time_to_accuracy import Training, by_way, first_at, main, run, trained, tried


@pytest.fixture(scope="module")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("graph") / "small.npz"
    save(small_graph(), path)
    return str(path)


def training(way: str, dataset: str, memory: int = 1 << 30) -> Training:
    return Training(way, "gat", dataset, "data", memory, 0.4, 0)


@pytest.mark.parametrize(("way", "size"), [("wrapped", None), ("cluster", 20)])
def test_the_weights_of_a_training_are_evaluated_in_order(
    way: str, size: int | None, dataset: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    # A clock that counts its readings, one at each end of a step: 1/128 s is exact in binary.
    clock = SimpleNamespace(perf_counter=(tick / 128 for tick in itertools.count()).__next__)
    monkeypatch.setattr(time_to_accuracy, "time", clock)
    found = trained(vars(training(way, dataset)), size)
    curve = found["curve"]
    assert found["steps"] == 52  # the first whose end is at 0.4 s or later
    assert len(curve) == 30  # evaluations of a training
    seconds, epochs = ([point[name] for point in curve] for name in ("seconds", "epochs"))
    assert seconds == sorted(seconds) and seconds[-1] == 52 / 128
    assert epochs == sorted(epochs) and epochs[0] > 0
    # A whole graph takes one step an epoch, and 40 clusters in batches of 20 two.
    each = 1 if size is None else 2
    assert epochs == pytest.approx([128 * at / each for at in seconds], rel=0.5)
    assert all(0 <= point[of] <= 1 for point in curve for of in ("val", "test"))
    assert max(point["val"] for point in curve) > 0.5


def test_a_few_steps_have_a_peak() -> None:
    large = training("cluster", "synthetic:ogbn-arxiv@0.02")
    assert tried(vars(large), 10)["peak_bytes"] > 0


def test_batches_are_the_largest_that_fit(dataset: str, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[str, int | None]] = []

    def apart(function: str, _: Training, size: int | None, way: Any) -> list[Any]:
        asked.append((function, size))
        if size == 20:
            return [{"reason": "out of memory"}]
        return [{"peak_bytes": 1000 * (size or 0)}]

    monkeypatch.setattr(time_to_accuracy, "_apart", apart)
    assert run(training("cluster", dataset, 6000)) == {"batch": 5, "peak_bytes": 5000}
    assert asked == [("tried", 20), ("tried", 10), ("tried", 5), ("trained", 5)]
    assert run(training("cluster", dataset, 10)) == {"reason": "no batch is small enough"}
    assert run(training("stock", dataset, 10))["batch"] is None
    assert BATCHES["cluster"] == tuple(sorted(BATCHES["cluster"], reverse=True))
    monkeypatch.setattr(time_to_accuracy, "_apart", lambda *_: [{"reason": "failed: x"}])
    assert run(training("cluster", dataset)) == {"reason": "failed: x"}


def curve(*scores: float) -> list[dict[str, float]]:
    return [
        {"seconds": 10.0 * n, "epochs": 2.0 * n, "val": score, "test": score - 0.01}
        for n, score in enumerate(scores, 1)
    ]


def test_the_first_time_at_a_score() -> None:
    assert first_at(curve(0.5, 0.7, 0.6, 0.8), 0.7) == curve(0.5, 0.7)[-1]
    assert first_at(curve(0.5), 0.7) is None


def test_the_table_and_going_on(
    dataset: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    scores = {0: (0.5, 0.7, 0.8), 1: (0.6, 0.65, 0.75)}

    def result(training: Training) -> dict[str, Any]:
        if training.way == "neighbor":
            return {"reason": "no batch is small enough"}
        size = 5 if training.way == "cluster" else None
        return {
            "batch": size,
            "peak_bytes": 9e6,
            "steps": 3,
            "curve": curve(*scores[training.seed]),
        }

    monkeypatch.setattr(time_to_accuracy, "run", result)
    flags = ["--dataset", dataset, "--memory", "1GB", "--out", str(tmp_path), "--seeds", "0-1"]
    flags += ["--targets", "0.5,0.7,0.8"]
    assert main([*flags, "--ways", "stock,cluster,neighbor"]) == 0
    assert "no batch is small enough" in capsys.readouterr().out
    content = json.loads((tmp_path / "time_to_accuracy.json").read_text())
    assert [*content["runs"]] == ["stock", "cluster", "neighbor"]
    shown = by_way(content)
    assert [*shown.head[4:]] == ["50 %", "70 %", "80 %", "test at the best"]
    whole, batches = shown.rows
    assert whole == (
        *("stock PyG, whole graph", "the graph", "9", "5.0", "10 s", "20 to 30 s"),
        *("reached by 1 of 2", "74.00 to 79.00 %"),
    )
    assert batches[:2] == ("stock PyG, batches of clusters", "5 of 40 clusters")
    monkeypatch.setattr(time_to_accuracy, "run", None)
    assert main([*flags, "--ways", "stock,cluster,neighbor"]) == 0
