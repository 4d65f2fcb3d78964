"""Trials in processes of their own, and the commands that show them."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from experiments import allocators, memory, scaling, swap
from experiments.helpers import comparison
from experiments.helpers.errors import ExperimentError
from experiments.helpers.process import (
    ALLOCATORS,
    call,
    checked,
    ended_by_memory,
    environment,
    set_cap,
)
from experiments.helpers.runner import reason_of, run
from experiments.helpers.strategies import Case
from experiments.scaling import expected_size, largest
from gact_graph.support.memory.policy import SWITCH

SMALL = "synthetic:ogbn-arxiv@0.01"
FLAGS = ["--dataset", SMALL, "--steps", "2"]


class Trials:
    """Stands in for trials, and remembers the cases."""

    def __init__(self, result: Callable[[Case], dict[str, Any]]) -> None:
        self.cases: list[Case] = []
        self._result = result

    def __call__(self, case: Case) -> dict[str, Any]:
        self.cases.append(case)
        return self._result(case)


class TestProcess:
    @pytest.mark.long
    def test_failures(self) -> None:
        assert call("math:sqrt", -1.0)["reason"].startswith("failed: ValueError")
        assert call("time:sleep", 60, limit=0.5) == {"reason": "not finished in 0.5 s"}
        with pytest.raises(ExperimentError, match="it: failed: x"):
            checked({"reason": "failed: x"}, "it")
        assert checked({"reason": "out of memory"}, "it") is None

    def test_a_want_of_memory_comes_before_its_consequences(self) -> None:
        lost, full, good = {"reason": "failed: lost"}, {"reason": "out of memory"}, {"loss": 1}
        assert reason_of([good, lost, full]) == "out of memory"
        assert reason_of([good, lost]) == "failed: lost"
        assert reason_of([good]) is None

    @pytest.mark.long
    def test_the_cap_is_enforced(self) -> None:
        small, large = (
            run(Case("gcn", "stock", SMALL, steps=1, layers=n, cap_bytes=300_000_000))
            for n in (2, 200)
        )
        assert small["step_seconds"] > 0 and large == {"reason": "out of memory"}

    @pytest.mark.parametrize(
        ("code", "errors", "memory_ended_it"),
        [
            (1, "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB.", True),
            (1, "RuntimeError: CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling ...", True),
            (1, "RuntimeError: [enforce fail] DefaultCPUAllocator: can't allocate memory", True),
            (-6, "terminate called", True),
            (-9, "", True),
            (1, "RuntimeError: CUDA error: an illegal memory access was encountered", False),
            (-11, "", False),
        ],
    )
    def test_an_end_for_want_of_memory(self, code: int, errors: str, memory_ended_it: bool) -> None:
        assert ended_by_memory(code, errors) == memory_ended_it

    def test_the_cap_on_cuda_is_a_share_of_the_card(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """With a card that is played; a device without a number is the current one."""

        class Card:
            total_memory = 16_000_000_000

        seen: list[tuple[float, int]] = []
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: Card)
        monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: 2_000_000_000)
        monkeypatch.setattr(torch.cuda, "current_device", lambda: 3)
        monkeypatch.setattr(
            torch.cuda, "set_per_process_memory_fraction", lambda *a: seen.append(a)
        )
        set_cap(torch.device("cuda"), 6_000_000_000)
        set_cap(torch.device("cuda:1"), 2_000_000_000)
        assert seen == [(0.5, 3), (0.25, 1)]
        with pytest.raises(ExperimentError, match=r"16.0 GB \(got 15.0 GB beyond"):
            set_cap(torch.device("cuda"), 15_000_000_000)

    @pytest.mark.gpu
    def test_on_cuda(self) -> None:
        found = run(Case("gcn", "lossless", SMALL, device="cuda"))
        assert abs(found["held_bytes"] / found["saved_bytes"] - 1) < 0.1
        assert found["peak_bytes"] < found["reserved_bytes"]
        capped = Case("gcn", "stock", SMALL, device="cuda", layers=200, cap_bytes=300_000_000)
        assert run(capped) == {"reason": "out of memory"}


class TestAllocators:
    def test_kept_memory_is_the_default(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv(SWITCH, "0")
        assert SWITCH not in environment("kept")

    @pytest.mark.parametrize("name", [name for name in ALLOCATORS if name != "kept"])
    def test_others_keep_nothing(self, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("ctypes.util.find_library", "lib{}.so".format)
        for variable in ("LD_PRELOAD", "MALLOC_CONF"):  # of a caller under jemalloc
            monkeypatch.setenv(variable, "caller")
        found = environment(name)
        assert found[SWITCH] == "0" and "caller" not in found.values()
        assert ("LD_PRELOAD" in found) == name.startswith("jemalloc")
        assert ("MALLOC_CONF" in found) == (name == "jemalloc-tuned")

    def test_one_that_is_missing_is_a_reason(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("ctypes.util.find_library", lambda name: None)
        for case in (
            Case("gat", "stock", SMALL, allocator="jemalloc"),
            Case("gat", "stock-jemalloc", SMALL),
        ):
            assert "apt-get install libjemalloc2" in run(case)["reason"]

    def test_rounds_go_over_all_and_are_taken_up_again(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        trials = Trials(
            lambda case: (
                {"reason": "failed: no luck"}
                if case.allocator == "glibc"
                else {"step_seconds": float(len(trials.cases)), "peak_bytes": 2_000_000}
            )
        )
        monkeypatch.setattr(comparison, "run", trials)
        file = tmp_path / "found.json"
        flags = ["--models", "gcn", "--variants", "stock", "--out", str(file), "--rounds"]
        assert allocators.main([*flags, "2"]) == 0
        assert [case.allocator for case in trials.cases] == [*ALLOCATORS] * 2
        assert trials.cases[0].model == "gcn-edge_index" and trials.cases[0].adaptive
        text = " ".join(capsys.readouterr().out.split())
        assert "failed: no luck" in text and "3.00 s, 2 MB" in text
        assert allocators.main([*flags, "3"]) == 0
        assert [case.allocator for case in trials.cases[8:]] == ["glibc", "glibc", *ALLOCATORS]
        found = json.loads(file.read_text())
        assert found["medians"]["gcn"]["stock"]["kept"]["step_seconds"] == 5
        [row] = allocators.by_allocator(found["medians"]).rows
        assert row[:3] == ("GCN", "stock PyG", "5.00 s, 2 MB") and row[-1] == "not run"


class TestMemory:
    @pytest.mark.usefixtures("forked")
    def test_end_to_end(self, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        flags = [*FLAGS, "--variants", "stock,L1+blocks", "--out", str(tmp_path)]
        assert memory.main(flags) == 0
        found = json.loads((tmp_path / "memory.json").read_text())["variants"]
        assert [*found] == ["stock", "L1+blocks"]
        for name, result in found.items():
            assert result["peak_bytes"] > 0 and result["step_seconds"] > 0
            assert (result["raw_bytes"] is None) == (name == "stock")
            assert result["held_bytes"] is None and result["reserved_bytes"] is None  # on the CPU
        assert found["L1+blocks"]["saved_bytes"] < found["stock"]["saved_bytes"]
        assert "L1+blocks" in capsys.readouterr().out

    def test_a_variant_that_fails_is_a_row_with_the_reason(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        good = {"saved_bytes": None, "peak_bytes": 7_000_000, "step_seconds": 1.0}
        trials = Trials(lambda c: {"reason": "out of memory"} if c.strategy == "L1" else good)
        monkeypatch.setattr(comparison, "run", trials)
        flags = [*FLAGS, "--variants", "stock,L1,CB2", "--out", str(tmp_path)]
        for _ in range(2):
            assert memory.main(flags) == 0
        assert len(trials.cases) == 3
        found = json.loads((tmp_path / "memory.json").read_text())["variants"]
        once = good | {"rounds": 1}
        assert found == {"stock": once, "L1": {"reason": "out of memory"}, "CB2": once}
        text = capsys.readouterr().out
        assert "out of memory" in text and "1.0x" in text


class TestSwap:
    def test_table_and_file(self, tmp_path: Path, monkeypatch, capsys) -> None:
        def result(case: Case) -> dict[str, Any]:
            i = swap.STRATEGIES.index(case.strategy)
            host = i * 10**7 if case.strategy.startswith("L") else None
            step = 0.5 + 0.1 * i
            held = (10 - i) * 10**8
            return {
                **{"held_bytes": held, "host_bytes": host},
                **{"peak_bytes": 2 * 10**9, "step_seconds": step},
            }

        monkeypatch.setattr(comparison, "run", Trials(result))
        monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
        assert swap.main(["--device", "cuda", "--steps", "1", "--out", str(tmp_path)]) == 0
        text = capsys.readouterr().out
        for words in (*swap.STRATEGIES, "1,000", "600", "40", "2,000", "0.900", "1.80x"):
            assert words in text
        content = json.loads((tmp_path / "swap.json").read_text())
        assert [*content["variants"]] == [*swap.STRATEGIES]

    def test_needs_a_gpu(self, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        assert swap.main(["--device", "cpu", "--out", str(tmp_path)]) == 1
        text = capsys.readouterr().err
        assert "Expected a CUDA device, which saved tensors could leave (got cpu)" in text

    @pytest.mark.gpu
    def test_end_to_end(self, tmp_path: Path) -> None:
        flags = ["--dataset", "synthetic:ogbn-arxiv@0.2", "--steps", "2"]
        assert swap.main([*flags, "--out", str(tmp_path)]) == 0
        ways = json.loads((tmp_path / "swap.json").read_text())["variants"]
        assert ways["L2"]["host_bytes"] > 0 == ways["L1"]["host_bytes"]


class TestScaling:
    @pytest.mark.parametrize("share", [0.0, 0.7, 0.97, 1.0, 1.03, 1.5, 100.0])
    @pytest.mark.parametrize(
        ("limit", "start"), [(0, 4), (1, 4), (3, 4), (17, 4), (1000, 8), (64, 64)]
    )
    def test_the_largest_that_fits_is_found(self, limit: int, start: int, share: float) -> None:
        """Whether the guess is right, a little off, or worth nothing."""
        tried: list[int] = []

        def fits(size: int) -> str | None:
            tried.append(size)
            return f"ran {size}" if size <= limit else None

        size, result = largest(fits, start, lambda fitted: int(limit * share))
        assert limit * 0.95 - 1 <= size <= limit
        assert result == (f"ran {size}" if size else None)
        assert len(tried) <= (6 if share in (0.97, 1.0, 1.03) else 22)
        assert len({*tried}) == len(tried)

    @pytest.mark.parametrize(("limit", "fixed"), [(60, 600), (23, 900), (1300, 300), (20, 9000)])
    def test_few_tries_suffice_where_each_unit_takes_as_much(self, limit: int, fixed: int) -> None:
        each, tried = 100, []
        cap = fixed + each * limit + each // 2

        def fits(size: int) -> dict[str, int] | None:
            tried.append(size)
            return {"peak_bytes": fixed + each * size} if size <= limit else None

        size, _ = largest(fits, 4, functools.partial(expected_size, cap))
        assert limit * 0.95 - 1 <= size <= limit
        assert len(tried) <= 5

    def test_end_to_end(self, tmp_path: Path, monkeypatch, capsys) -> None:
        """Up to 9 layers fit, or 3 hundredths of the graph; twice that with L1; CB2 breaks."""

        def result(case: Case) -> dict[str, Any]:
            if case.strategy == "CB2":
                return {"reason": "failed: no luck"}
            depth, limit = case.layers or 3, 2 if case.strategy == "L1" else 1
            hundredths = 100 * float(case.dataset.split("@")[1])
            if depth > 9 * limit or hundredths > 3 * limit:
                return {"reason": "out of memory"}
            return {"peak_bytes": 1, "step_seconds": depth * hundredths}

        trials = Trials(result)
        monkeypatch.setattr(scaling, "run", trials)
        flags = ["--dataset", SMALL, "--memory", "60MB", "--vary", "depth,graph", "--out"]
        flags += [str(tmp_path), "--variants"]
        assert scaling.main([*flags, "stock,L1"]) == 0
        found = json.loads((tmp_path / "scaling.json").read_text())["largest"]
        assert [found["depth"][name]["largest"] for name in ("stock", "L1")] == [9, 18]
        assert [found["graph"][name]["largest"] for name in ("stock", "L1")] == [3, 6]
        assert 0 < found["graph"]["stock"]["nodes"] < found["graph"]["L1"]["nodes"]
        assert {case.cap_bytes for case in trials.cases} == {60_000_000}
        text = capsys.readouterr().out
        assert "Largest depth" in text and "2.0x" in text
        shown = scaling.by_memory([{"memory": 10**9, "largest": found}])
        assert shown.head[0] == "memory" and shown.rows[0][0] == "1 GB"
        nodes = [f"{found['graph'][name]['nodes']:,}" for name in ("stock", "L1")]
        assert [*shown.rows[0][1:]] == [nodes[0], f"{nodes[1]} (2.0x)"]
        found["graph"]["stock"] = {"largest": 0, "peak_bytes": None, "step_seconds": None}
        small = scaling.by_memory([{"memory": 10**6, "largest": found}])
        assert [*small.rows[0][1:]] == ["none fits", nodes[1]]
        tries = len(trials.cases)
        assert scaling.main([*flags, "stock,CB2"]) == 1
        assert len(trials.cases) == tries + 1
        assert "a trial of CB2 failed: failed: no luck" in capsys.readouterr().err

    @pytest.mark.parametrize(
        ("flags", "words"),
        [
            (["--memory", "4"], "Expected an amount of memory such as 4GB"),
            (["--vary", "graph", "--dataset", "cora"], "Expected --dataset synthetic:NAME"),
            (["--vary", "height"], "Expected --vary of depth, width, graph"),
        ],
    )
    def test_bad_flags(self, flags: list[str], words: str, tmp_path: Path, capsys) -> None:
        assert scaling.main([*flags, "--out", str(tmp_path)]) == 2
        assert words in capsys.readouterr().err
