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
    assert len(found["slots"]) > 4
    for slot in found["slots"]:
        assert slot["predicted"] == pytest.approx(slot["true"], rel=0.8), slot
    assert found["together"] == pytest.approx(found["sum_of_single"], rel=0.5)
    for name in ("agreement", "sum"):
        assert (tmp_path / f"{name}.png").stat().st_size > 5000
    assert "all slots together" in capsys.readouterr().out
