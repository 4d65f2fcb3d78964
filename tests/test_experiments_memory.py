"""The tables of memory and of what fits, from trials in processes of their own."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from experiments import memory, scaling
from experiments.errors import ExperimentError
from experiments.scaling import largest
from experiments.trial import Specification, run_trial

SMALL = "synthetic:ogbn-arxiv@0.01"


@pytest.mark.parametrize(("limit", "start"), [(0, 4), (1, 4), (3, 4), (17, 4), (1000, 8), (64, 64)])
def test_the_largest_that_fits_is_found(limit: int, start: int) -> None:
    tried: list[int] = []

    def fits(size: int) -> str | None:
        tried.append(size)
        return f"ran {size}" if size <= limit else None

    size, result = largest(fits, start)
    assert limit * 0.95 - 1 <= size <= limit
    assert result == (f"ran {size}" if size else None)
    assert len(tried) < 20


def test_memory_end_to_end(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["--dataset", SMALL, "--steps", "2", "--variants", "stock,checkpoint,L1+blocks,CB2"]
    assert memory.main([*flags, "--out", str(tmp_path)]) == 0
    found = json.loads((tmp_path / "memory.json").read_text())
    assert [*found["variants"]] == ["stock", "checkpoint", "L1+blocks", "CB2"]
    for name, result in found["variants"].items():
        assert result["peak_bytes"] > 0 and result["step_seconds"] > 0
        assert (result["saved_bytes"] is None) == (name in ("stock", "checkpoint"))
        assert result["forward_seconds"] > 0
    assert (tmp_path / "memory.png").stat().st_size > 5000
    assert "CB2" in capsys.readouterr().out


def test_the_cap_is_enforced() -> None:
    small, large = (
        run_trial(Specification("gcn", "stock", SMALL, steps=1, layers=n, cap_bytes=300_000_000))
        for n in (2, 200)
    )
    assert small is not None and large is None


def test_a_failure_of_another_kind_is_told() -> None:
    with pytest.raises(ExperimentError, match=r"a trial of stock failed: .*no_such"):
        run_trial(Specification("gcn", "stock", "no_such", steps=1))


def test_scaling_end_to_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    seen: list[Specification] = []

    def trial(specification: Specification) -> dict[str, float] | None:
        """Fits up to 9 layers, or 3 hundredths of the graph; twice that with L1."""
        seen.append(specification)
        depth = specification.layers or 3
        hundredths = 100 * float(specification.dataset.split("@")[1])
        limit = 2 if specification.variant == "L1" else 1
        if depth > 9 * limit or hundredths > 3 * limit:
            return None
        return {"peak_bytes": 1, "step_seconds": depth * hundredths}

    monkeypatch.setattr(scaling, "run_trial", trial)
    flags = ["--dataset", SMALL, "--memory", "60MB", "--vary", "depth,graph", "--model", "gcn"]
    assert scaling.main([*flags, "--variants", "stock,L1", "--out", str(tmp_path)]) == 0
    found = json.loads((tmp_path / "scaling.json").read_text())["largest"]
    assert [found["depth"][name]["largest"] for name in ("stock", "L1")] == [9, 18]
    assert [found["graph"][name]["largest"] for name in ("stock", "L1")] == [3, 6]
    assert 0 < found["graph"]["stock"]["nodes"] < found["graph"]["L1"]["nodes"]
    assert {s.cap_bytes for s in seen} == {60_000_000}
    assert (tmp_path / "scaling.png").stat().st_size > 5000
    text = capsys.readouterr().out
    assert "Largest depth" in text and "2.0x" in text


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--memory", "4"], "Expected a size such as 4GB"),
        (["--vary", "graph", "--dataset", "cora"], "Expected --dataset synthetic:NAME"),
        (["--vary", "height"], "Expected --vary of depth, width, graph"),
    ],
)
def test_bad_flags(
    flags: list[str], words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert scaling.main([*flags, "--out", str(tmp_path)]) == 2
    assert words in capsys.readouterr().err
