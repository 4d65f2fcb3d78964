"""The table of scores, from two epochs on a small file."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from experiments import scores
from experiments.scores import STUDIES, Study, main, score_rows


def small_graph(folder: Path) -> None:
    generator = np.random.default_rng(0)
    np.savez(
        folder / "small.npz",
        edge_index=generator.integers(0, 300, (2, 2000)),
        x=generator.random((300, 16), dtype=np.float32),
        y=np.arange(300) % 3,
    )


def test_the_studies_are_those_promised() -> None:
    assert len({study.name for study in STUDIES}) == len(STUDIES) == 14
    assert {s.seeds for s in STUDIES if s.graph in ("cora", "citeseer")} == {tuple(range(10))}


def test_end_to_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    small_graph(tmp_path)
    study = Study("small", "gcn", (0, 1), {"epochs": 2, "hidden": 64})
    monkeypatch.setattr(scores, "STUDIES", (study,))
    out = tmp_path / "out"
    assert main(["--data", str(tmp_path), "--out", str(out)]) == 0
    found = json.loads((out / "scores.json").read_text())
    runs = found["small-gcn"]["runs"]
    assert set(runs) == {"fp32", "adaptive-4", "adaptive-3", "adaptive-2"}
    assert [record["seed"] for record in runs["adaptive-2"]] == [0, 1]
    assert all(r["passes"] == 0 < r["train_seconds"] for r in runs["fp32"])
    assert all(r["passes"] >= 1 and r["rate"] > 2 for r in runs["adaptive-2"])
    assert found["small-gcn"]["config"]["dataset"] == "small.npz"
    [row] = score_rows(found)
    assert row[:3] == ("small", "GCN", "2") and "x)" in row[-1]
    assert "| small | GCN | 2 |" in (out / "scores.md").read_text()
    assert "small" in capsys.readouterr().out


def test_an_unknown_graph_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--data", str(tmp_path), "--out", str(tmp_path), "--graphs", "corra"]) == 2
    assert "corra" in capsys.readouterr().err
