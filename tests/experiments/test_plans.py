"""Plans beside uniform strategies: the command goes on where it was stopped, and its tables."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from experiments import plans
from experiments.helpers import result_tables
from experiments.helpers.pictures import draw_plans

MB = 10**6


class Processes:
    """Stands in for processes of their own; raises at the last task it is told of."""

    def __init__(self, last: int | None = None) -> None:
        self.tasks: list[str] = []
        self.last = last

    def __call__(
        self, function: str, calls: Sequence[Sequence[Any]], environment: Mapping[str, str]
    ) -> list[dict[str, Any]]:
        return [self.run(function, *calls[0])]

    def run(self, function: str, *task: Any) -> dict[str, Any]:
        if len(self.tasks) == self.last:
            raise KeyboardInterrupt
        name = function.rpartition(":")[2]
        self.tasks.append(name)
        if name == "stock":
            return {"peak": 100 * MB}
        if name == "uniform":
            way = {"level": "L1", "bits": 4, "blocks": True, "strategy": "L1, 4 bits"}
            return {"way": way if task[-1] > 20 * MB else None}
        if name == "peak_of":
            if task[-1] < 10 * MB:
                return {"strategy": plans.REFUSED}
            return {"strategy": "L1, 8 bits, 3 exact", "planned": 19 * MB, "peak": 18 * MB}
        uniform = {"uniform_error": 0.05, "uniform_seconds": 1.25, "ratio": 0.8}
        return {"error": 0.01, "seconds": 1.0} | ({} if task[-1] is None else uniform)


def run(out: Path, processes: Processes, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    monkeypatch.setattr(plans, "call_together", processes)
    given = ["--models", "gcn", "--datasets", "digits", "--shares", "50,20,5"]
    with contextlib.suppress(KeyboardInterrupt):
        plans.main([*given, "--out", str(out)])
    found: dict[str, Any] = json.loads((out / plans.FILE_NAME).read_text())
    return found


def test_goes_on_from_what_was_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = run(tmp_path / "whole", Processes(), monkeypatch)
    run(tmp_path / "halved", Processes(last=7), monkeypatch)
    rest = Processes()
    found = run(tmp_path / "halved", rest, monkeypatch)
    assert "stock" not in rest.tasks and found["plans"] == whole["plans"]
    assert [row["share"] for row in found["plans"]] == [0.5, 0.2, 0.05]


def test_the_table_and_its_verdict(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    content = run(tmp_path, Processes(), monkeypatch)
    first, second, last = content["plans"]
    assert first["plan"] == "L1, 8 bits, 3 exact" and first["uniform"] == "L1, 4 bits"
    assert second["uniform"] == plans.REFUSED and last["plan"] == plans.REFUSED
    text = plans.verdict(content["plans"])
    assert "Budgets kept: 2 of 2, 1 of them refused by each uniform strategy." in text
    assert "Planned peaks within 5 % of the measured: 0 of 2, from +6% to +6%." in text
    assert "Ratio of time: 0.80 to 0.80" in text and "error of the gradient: 0.20" in text
    table = plans.rows(content["plans"]).markdown()
    assert "| gcn | digits | 50% | 50 | L1, 8 bits, 3 exact | 19 | 18 | 1.00 | 1.00% |" in table
    assert "refused" in table and text in capsys.readouterr().out


def test_the_page_has_the_table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run(tmp_path, Processes(), monkeypatch)
    pages = result_tables.tables(tmp_path)
    assert "Budgets kept" in pages["plans"]()


@pytest.mark.parametrize("function", ["stock", "uniform"])
def test_an_estimate_without_memory_ends_in_one_line(
    function: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def apart(name: str, calls: Sequence[Sequence[Any]], _: Any) -> list[dict[str, Any]]:
        if name.endswith(f":{function}"):
            return [{"reason": "out of memory"}]
        return [Processes().run(name, *calls[0])]

    monkeypatch.setattr(plans, "call_together", apart)
    assert plans.main(["--models", "gcn", "--shares", "50", "--out", str(tmp_path)]) == 1
    assert capsys.readouterr().err == f"plans: {function} of gcn: out of memory\n"


@pytest.mark.parametrize(
    ("fitting", "expected"),
    [
        (
            [("lossless", 32, False), ("lossless", 32, True), ("L1", 8, True)],
            ("lossless", 32, True),
        ),
        ([("CB2", 8, True), ("L1", 8, True), ("L1", 2, True)], ("L1", 8, True)),
        ([("CB2", 8, True), ("L1", 4, True)], ("CB2", 8, True)),
        ([], None),
    ],
)
def test_the_best_uniform_strategy_is_exact_or_else_has_the_most_bits(
    fitting: list[tuple[str, int, bool]], expected: tuple[str, int, bool] | None
) -> None:
    rows = [{"level": level, "bits": b, "blocks": k, "fits": True} for level, b, k in fitting]
    found = plans.best([*rows, {"level": None, "bits": 32, "blocks": False, "fits": False}])
    assert (found and (found["level"], found["bits"], found["blocks"])) == expected


def test_other_ways_are_measured_and_drawn(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def beside(function: str, *task: Any) -> dict[str, Any]:
        way = task[-1]
        error = 1e-8 if way == "stock" else 0.1 if way == "L1 2" else 0.01
        return {"peak": 40 * MB if way == "stock" else 8 * MB, "seconds": 2.5, "error": error}

    processes, allocators = Processes(), []

    def apart(
        function: str, calls: Sequence[Sequence[Any]], environment: Mapping[str, str]
    ) -> list[dict[str, Any]]:
        [call] = calls
        allocators.append(environment.get("of"))
        found = beside if function.endswith("beside") else processes.run
        return [found(function, *call)]

    monkeypatch.setattr(plans, "call_together", apart)
    monkeypatch.setattr(plans, "environment", lambda allocator: {"of": allocator})
    given = ["--models", "gcn", "--datasets", "digits", "--shares", "50", "--ways", "stock,L1 2"]
    plans.main([*given, "--out", str(tmp_path)])
    found = json.loads((tmp_path / plans.FILE_NAME).read_text())["ways"]
    assert [row["way"] for row in found] == ["stock", "L1 2", 50 * MB]
    assert allocators[-3:] == ["jemalloc-tuned", "kept", "kept"]  # peers keep memory, too
    svg = draw_plans(found)
    for text in ("stock 40 MB 2.50 s", "L1 2 bit 8 MB 2.50 s", "plan for 50 MB 8 MB 2.50 s"):
        assert text in svg
    assert plans.main(["--ways", "L3 4", "--out", str(tmp_path)]) == 2


def test_a_way_by_its_name() -> None:
    for way in ("checkpoint", "lossless + blocks", "L1 4"):
        found = plans.beside("gcn", "digits", "data", way)
        assert found["peak"] > 0 and (found["error"] > 1e-3) == (way == "L1 4")
