"""The check of sensitivities against brute force, with few draws."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from experiments.variance import main


def test_end_to_end(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert (
        main(
            [
                "--dataset",
                "synthetic:ogbn-arxiv@0.003",
                "--draws",
                "6",
                "--bits",
                "6",
                "--out",
                str(tmp_path),
            ]
        )
        == 0
    )
    found = json.loads((tmp_path / "variance.json").read_text())
    assert len(found["slots"]) == 4
    for slot in found["slots"]:
        assert slot["predicted"] == pytest.approx(slot["true"], rel=0.8), slot
        assert slot["bias"] ** 2 <= slot["true"]
    assert abs(found["bias_squared"]) < 10 * found["bias_squared_error"] + found["together"]
    assert found["together"] == pytest.approx(found["sum_of_single"], rel=0.5)
    assert (tmp_path / "agreement.png").stat().st_size > 5000
    said = capsys.readouterr().out
    assert "all slots together" in said and "standard error" in said


def test_models_and_norms(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["--dataset", "synthetic:ogbn-arxiv@0.003", "--draws", "4", "--out", str(tmp_path)]
    model = ["--model", "gcn", "--norm", "BatchNorm", "--act", "elu"]
    assert main([*flags, *model]) == 0
    found = json.loads((tmp_path / "variance.json").read_text())
    slots = {slot["slot"] for slot in found["slots"]}
    assert {"norms.0/module/batch_norm.input", "act/elu.derivative"} <= slots
    assert "% of the gradient" in capsys.readouterr().out


def test_the_total_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["--dataset", "synthetic:ogbn-arxiv@0.003", "--draws", "4", "--out", str(tmp_path)]
    assert main([*flags, "--model", "gcn", "--total"]) == 0
    found = json.loads((tmp_path / "variance.json").read_text())
    assert "slots" not in found and found["together"] > 0
    assert [path.name for path in tmp_path.iterdir()] == ["variance.json"]
    assert "variance of all slots together" in capsys.readouterr().out
