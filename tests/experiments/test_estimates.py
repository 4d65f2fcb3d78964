"""Predicted and measured peaks: the command goes on where it was stopped, and its tables."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path
from typing import Any

import pytest

from experiments import estimates
from experiments.helpers import result_tables

WAYS = ("stock", "L1, 4 bits")


def ways(*peaks: int) -> dict[str, Any]:
    return {"ways": [{"way": w, "peak_bytes": p} for w, p in zip(WAYS, peaks, strict=True)]}


class Processes:
    """Stands in for processes of their own; raises at the last task it is told of."""

    def __init__(self, last: int | None = None) -> None:
        self.tasks: list[str] = []
        self.last = last

    def __call__(self, function: str, *task: Any) -> dict[str, Any]:
        if len(self.tasks) == self.last:
            raise KeyboardInterrupt
        name = function.rpartition(":")[2]
        self.tasks.append(name)
        if name == "estimate":
            return ways(100_000_000, 10_000_000)
        if name == "peak_of":
            stock = task[-1]["way"] == "stock"
            return {"peak_bytes": 104_000_000} if stock else {"reason": "out of memory"}
        return {"way": "L1, 4 bits", "peak_bytes": 9_000_000}


def run(out: Path, processes: Processes, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    monkeypatch.setattr(estimates, "call", processes)
    given = ["--models", "gcn", "--datasets", "digits", "--ways", "stock,L1 4", "--budgets", "L1 4"]
    with contextlib.suppress(KeyboardInterrupt):
        estimates.main([*given, "--out", str(out)])
    found: dict[str, Any] = json.loads((out / estimates.FILE_NAME).read_text())
    return found


def test_goes_on_from_what_was_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = run(tmp_path / "whole", Processes(), monkeypatch)
    run(tmp_path / "halved", Processes(last=2), monkeypatch)
    rest = Processes()
    found = run(tmp_path / "halved", rest, monkeypatch)
    assert rest.tasks == ["peak_of", "choice"]
    assert all(found[kind] == whole[kind] for kind in ("estimates", "pairs", "budgets"))
    assert len(found["pairs"]) == 2 and len(found["budgets"]) == 1


def test_other_settings_want_another_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run(tmp_path, Processes(), monkeypatch)
    monkeypatch.setattr(estimates, "_STEPS", 5)
    assert estimates.main(["--models", "gcn", "--out", str(tmp_path)]) != 0
    assert "steps 4 instead of 5" in " ".join(capsys.readouterr().err.split())


def test_tables(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = run(tmp_path, Processes(), monkeypatch)
    table = result_tables._estimates(found)
    assert "| gcn | digits | 100 / 104 | 10 / does not fit |" in table
    assert "1 of 1 predictions are within 10% of the measurement" in table
    table = result_tables._budgets(found)
    assert "| gcn | digits | 16 | L1, 4 bits | L1, 4 bits | 9 |" in table
    assert "Budgets kept: 1 of 1; refused although a strategy fits: 0." in table


@pytest.mark.parametrize(("peak", "kept"), [(5, True), (7, False), (None, False)])
def test_a_budget_is_kept_by_steps_that_took_no_more(peak: int | None, kept: bool) -> None:
    row = {"model": "gat", "dataset": "cora", "memory": 6, "for": "stock", "chosen": None}
    assert f"Budgets kept: {int(kept)} of 1" in estimates.budgets([row | {"peak": peak}])[1]
