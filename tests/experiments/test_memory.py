"""The tables of memory and of what fits, from trials in processes of their own."""

from __future__ import annotations

import functools
import json
from pathlib import Path

import pytest
import torch

from experiments import memory, scaling
from experiments.helpers.cap import ended_by_memory, set_cap
from experiments.helpers.errors import ExperimentError
from experiments.helpers.trial import Specification, run_trial
from experiments.scaling import expected_size, largest

SMALL = "synthetic:ogbn-arxiv@0.01"


@pytest.mark.parametrize("share", [0.0, 0.7, 0.97, 1.0, 1.03, 1.5, 100.0])
@pytest.mark.parametrize(("limit", "start"), [(0, 4), (1, 4), (3, 4), (17, 4), (1000, 8), (64, 64)])
def test_the_largest_that_fits_is_found(limit: int, start: int, share: float) -> None:
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
def test_few_tries_find_the_largest_where_each_unit_takes_as_much(limit: int, fixed: int) -> None:
    """Beside what is the same for every size: a search from the largest alone took up to 18."""
    each, tried = 100, []
    memory = fixed + each * limit + each // 2

    def fits(size: int) -> dict[str, int] | None:
        tried.append(size)
        return {"peak_bytes": fixed + each * size} if size <= limit else None

    size, _ = largest(fits, 4, functools.partial(expected_size, memory))
    assert limit * 0.95 - 1 <= size <= limit
    assert len(tried) <= 5


def test_memory_end_to_end(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["--dataset", SMALL, "--steps", "2", "--variants", "stock,checkpoint,L1+blocks,CB2"]
    assert memory.main([*flags, "--out", str(tmp_path)]) == 0
    found = json.loads((tmp_path / "memory.json").read_text())
    assert [*found["variants"]] == ["stock", "checkpoint", "L1+blocks", "CB2"]
    for name, result in found["variants"].items():
        assert result["peak_bytes"] > 0 and result["step_seconds"] > 0
        plain = name in ("stock", "checkpoint")
        assert (result["saved_bytes"] is None) == (result["raw_bytes"] is None) == plain
        times = [t for t, _ in result["curve"]]
        assert times == sorted(times) and 0 < result["forward_seconds"] <= times[-1]
        assert result["held_bytes"] is None and result["reserved_bytes"] is None  # on the CPU
    assert (tmp_path / "memory.png").stat().st_size > 5000
    assert "CB2" in capsys.readouterr().out


def test_what_was_measured_survives_a_variant_that_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def trial(specification: Specification) -> dict[str, int]:
        if specification.variant == "L1":
            raise ExperimentError("no luck")
        return {"peak_bytes": 7}

    monkeypatch.setattr(memory, "run_trial", trial)
    flags = ["--dataset", SMALL, "--variants", "stock,L1", "--out", str(tmp_path)]
    assert memory.main(flags) == 1
    found = json.loads((tmp_path / "memory.json").read_text())
    assert found["variants"] == {"stock": {"peak_bytes": 7}}


def test_the_cap_is_enforced() -> None:
    small, large = (
        run_trial(Specification("gcn", "stock", SMALL, steps=1, layers=n, cap_bytes=300_000_000))
        for n in (2, 200)
    )
    assert small is not None and large is None


@pytest.mark.parametrize(
    ("code", "errors", "memory_ended_it"),
    [
        (1, "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB.", True),
        (1, "RuntimeError: CUDA error: out of memory", True),
        (1, "RuntimeError: CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling ...", True),
        (1, "RuntimeError: [enforce fail] DefaultCPUAllocator: can't allocate memory", True),
        (-6, "terminate called", True),
        (-9, "", True),
        (1, "RuntimeError: CUDA error: an illegal memory access was encountered", False),
        (-11, "", False),
    ],
)
def test_an_end_for_want_of_memory_is_known(code: int, errors: str, memory_ended_it: bool) -> None:
    assert ended_by_memory(code, errors) == memory_ended_it


class _Card:
    total_memory = 16_000_000_000


def test_the_cap_on_cuda_is_a_share_of_the_card(monkeypatch: pytest.MonkeyPatch) -> None:
    """With a card that is played; a device without a number is the current one."""
    seen: list[tuple[float, int]] = []
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: _Card)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: 2_000_000_000)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 3)
    monkeypatch.setattr(
        torch.cuda, "set_per_process_memory_fraction", lambda *given: seen.append(given)
    )
    set_cap(torch.device("cuda"), 6_000_000_000)
    set_cap(torch.device("cuda:1"), 2_000_000_000)
    assert seen == [(0.5, 3), (0.25, 1)]
    with pytest.raises(ExperimentError, match=r"within the device's 16.0 GB \(got 15.0 GB beyond"):
        set_cap(torch.device("cuda"), 15_000_000_000)


@pytest.mark.gpu
def test_trials_on_cuda() -> None:
    found = run_trial(Specification("gcn", "lossless", SMALL, device="cuda"))
    assert found is not None and found["held_bytes"] > 0
    assert abs(found["held_bytes"] / found["saved_bytes"] - 1) < 0.1
    assert found["peak_bytes"] < found["reserved_bytes"]
    capped = Specification("gcn", "stock", SMALL, device="cuda", layers=200, cap_bytes=300_000_000)
    assert run_trial(capped) is None


def test_a_failure_of_another_kind_is_told() -> None:
    with pytest.raises(ExperimentError, match=r"a trial of stock failed: .*no_such"):
        run_trial(Specification("gcn", "stock", "no_such", steps=1))


def test_a_search_that_is_stopped_leaves_what_it_had(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def trial(specification: Specification) -> dict[str, float] | None:
        if specification.variant == "L1":
            raise ExperimentError("stopped")
        return None if (specification.layers or 0) > 5 else {"peak_bytes": 1, "step_seconds": 1}

    monkeypatch.setattr(scaling, "run_trial", trial)
    flags = ["--dataset", SMALL, "--vary", "depth", "--variants", "stock,L1"]
    assert scaling.main([*flags, "--out", str(tmp_path)]) == 1
    found = json.loads((tmp_path / "scaling.json").read_text())["largest"]
    assert found["depth"]["stock"]["largest"] == 5 and "L1" not in found["depth"]


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
