"""Bits by the library's measurement beside those of Algorithm 1, on a small graph."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from experiments.allocation import main, ratios


def test_ratios_are_geometric_means_over_points() -> None:
    points = [
        {"library": {"error": a}, "algorithm 1": {"error": b}, "uniform": {"error": c}}
        for a, b, c in ((2.0, 1.0, 8.0), (1.0, 2.0, 1.0))
    ]
    over_sweep, over_uniform = ratios(points, "error")
    assert over_sweep == pytest.approx(1.0)
    assert over_uniform == pytest.approx(0.5)


def test_end_to_end(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["--models", "gat", "--dataset", "synthetic:ogbn-arxiv@0.003", "--ways", "L1+blocks"]
    flags += ["--bits", "3", "--epochs", "2", "--points", "1", "--draws", "3"]
    assert main([*flags, "--out", str(tmp_path)]) == 0
    [row] = json.loads((tmp_path / "gat.json").read_text())["rows"]
    [point] = row["points"]
    assert point["epoch"] == 2
    for scheme in ("uniform", "library", "algorithm 1"):
        assert 0 < point[scheme]["variance"] <= point[scheme]["error"]
    # Both had the same budget to give, and gave it to the same slots.
    assert point["library"]["bits"].keys() == point["algorithm 1"]["bits"].keys()
    assert "relative to others" in capsys.readouterr().out


def test_an_unknown_way_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--ways", "L7", "--out", str(tmp_path)]) == 2
    assert "Expected --ways of L1, L1+blocks, CB2 (got 'L7')" in capsys.readouterr().err
