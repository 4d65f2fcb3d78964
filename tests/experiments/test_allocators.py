"""A training step under each CPU allocator."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from experiments import allocators
from experiments.helpers.errors import ExperimentError
from experiments.helpers.peers.allocators import ALLOCATORS, environment
from experiments.helpers.peers.trial import Specification
from gact_graph.support.memory.policy import SWITCH


class TestEnvironment:
    def test_kept_memory_is_the_default(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv(SWITCH, "0")
        assert SWITCH not in environment("kept")

    @pytest.mark.parametrize("name", [name for name in ALLOCATORS if name != "kept"])
    def test_others_keep_nothing(self, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("ctypes.util.find_library", "lib{}.so".format)
        found = environment(name)
        assert found[SWITCH] == "0"
        assert ("LD_PRELOAD" in found) == name.startswith("jemalloc")
        assert ("MALLOC_CONF" in found) == (name == "jemalloc-tuned")

    def test_says_what_is_missing(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("ctypes.util.find_library", lambda name: None)
        with pytest.raises(ExperimentError, match="apt-get install libjemalloc2"):
            environment("jemalloc")
        assert environment("glibc")[SWITCH] == "0"


def test_rounds_go_over_all_allocators(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    asked: list[Specification] = []

    def trial(specification: Specification) -> dict[str, Any]:
        asked.append(specification)
        return {"step_seconds": float(len(asked)), "peak_bytes": 2_000_000 * len(asked)}

    monkeypatch.setattr(allocators, "run_trial", trial)
    file = tmp_path / "found.json"
    flags = ["--models", "gcn", "--variants", "stock", "--rounds", "3", "--out", str(file)]
    assert allocators.main(flags) == 0
    assert [one.allocator for one in asked] == [*ALLOCATORS] * 3
    found = json.loads(file.read_text())
    kept = found["medians"]["gcn"]["stock"]["kept"]
    assert kept["step_seconds"] == 5 and kept["peak_bytes"] == 10_000_000
    [row] = allocators.rows(found["medians"])
    assert row == ("GCN", "stock PyG", *(f"{n}.00 s, {2 * n} MB" for n in (5, 6, 7, 8)))
    assert "stock PyG" in capsys.readouterr().out


def test_a_failure_is_said(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(allocators, "run_trial", lambda _: {"reason": "out of memory"})
    assert allocators.main(["--models", "gat", "--variants", "stock"]) == 1
    assert "gat, stock, kept: out of memory" in capsys.readouterr().err
