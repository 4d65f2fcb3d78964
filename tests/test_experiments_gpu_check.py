"""The parts for a lent GPU, tiny and on the CPU."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from experiments import check_kernels, check_lossless, check_steps, gpu_check
from experiments.errors import ExperimentError
from experiments.gpu_check import Part, run_parts
from experiments.machine import gpus
from experiments.trial import Specification

CPU = torch.device("cpu")


@pytest.fixture
def saved() -> list[dict[str, Any]]:
    """What a part saved, in order, as JSON would have it."""
    return []


def _keep(saved: list[dict[str, Any]]) -> check_kernels.Save:
    return lambda found: saved.append(json.loads(json.dumps(found)))


def test_kernels_agree_with_the_reference(saved) -> None:
    assert check_kernels.check(CPU, _keep(saved), (0, 1, 65, 300), (1, 3, 16), 1000) == []
    assert [*saved[-1]["cases"]] == ["pack and unpack", "masks", "large"]
    assert saved[-1]["cases"]["pack and unpack"] > 400 and saved[-1]["cases"]["masks"] > 100
    assert len(saved) == 3


def test_kernels_that_differ_or_raise_are_told(saved, monkeypatch: pytest.MonkeyPatch) -> None:
    real = check_kernels.reference.pack

    def other(x: torch.Tensor, bits: int, group: int, seed: int) -> Any:
        if bits == 3:
            raise RuntimeError("no three\nand more")
        codes, stats = real(x, bits, group, seed)
        return codes ^ 1, stats

    monkeypatch.setattr(check_kernels.reference, "pack", other)
    failed = check_kernels.check(CPU, _keep(saved), (65,), (2, 3), 100)
    assert "normal 65 torch.float16, 2 bit, groups of 64, seed 0: differs" in failed
    told = "normal 65 torch.float16, 3 bit, groups of 64, seed 0: RuntimeError: no three"
    assert told in failed
    assert "large 100: differs" in failed
    assert saved[-1]["failed"] == failed


def test_same_bytes() -> None:
    a = torch.tensor([0.0, torch.nan])
    assert check_kernels.same_bytes(a, a.clone())
    assert not check_kernels.same_bytes(a, -a)  # 0 and -0
    assert not check_kernels.same_bytes(a, a.double())
    assert not check_kernels.same_bytes(a, a[:1])


def test_lossless_is_stock_on_the_cpu(saved) -> None:
    names = ("gcn", "gat", "gcnii", "SAGEConv, max", "GINConv", "EdgeConv")
    data = "synthetic:ogbn-arxiv@0.003"
    assert check_lossless.check(CPU, _keep(saved), data, names) == []
    assert [*saved[-1]["models"]] == [*names]
    for modes in saved[-1]["models"].values():
        assert [*modes] == ["as_is", "deterministic"]
        assert all(m["stock_identical"] and m["lossless_identical"] for m in modes.values())
    assert not torch.are_deterministic_algorithms_enabled()


@pytest.mark.parametrize(
    ("again", "lossless", "identical", "problem"),
    [
        (0.0, 0.0, True, None),
        (0.0, 5e-6, False, None),
        (0.0, 1e-4, False, "gradients are 1.0e-04 from stock's (bound 1.0e-05)"),
        (2e-5, 1e-4, False, None),
        (0.0, float("nan"), False, "gradients are nan from stock's (bound 1.0e-05)"),
    ],
)
def test_what_counts_as_rounding(
    again: float, lossless: float, identical: bool, problem: str | None
) -> None:
    result = {"stock_again": again, "lossless": lossless, "lossless_identical": identical}
    assert check_lossless.verdict(result) == problem


def test_a_model_that_fails_does_not_hide_the_next(saved, monkeypatch) -> None:
    real = check_lossless.compare

    def compare(subject: Any, graph: Any, device: torch.device) -> dict[str, Any]:
        if subject is check_lossless.CHECKED["gcn"]:
            raise RuntimeError("broken")
        return real(subject, graph, device)

    monkeypatch.setattr(check_lossless, "compare", compare)
    names = ("gcn", "TAGConv")
    failed = check_lossless.check(CPU, _keep(saved), "synthetic:ogbn-arxiv@0.003", names)
    assert failed == [f"gcn, {mode}: RuntimeError: broken" for mode in ("as_is", "deterministic")]
    assert saved[-1]["models"]["TAGConv"]["as_is"]["lossless_identical"]


def test_steps_are_saved_after_each_trial(saved, monkeypatch: pytest.MonkeyPatch) -> None:
    def trial(specification: Specification) -> dict[str, Any] | None:
        assert specification.device == "cpu"
        if specification.variant == "L1":
            raise ExperimentError("a trial of L1 failed: why")
        if specification.variant == "CB2":
            return None
        return {
            "step_seconds": 1.0,
            "raw_bytes": 985 if specification.variant == "lossless" else None,
            "saved_bytes": 110 if specification.variant == "lossless" else None,
            "held_bytes": 1000 if specification.variant == "stock" else 100,
            "curve": [[0.0, 1]],
        }

    monkeypatch.setattr(check_steps, "run_trial", trial)
    variants = ("stock", "lossless", "L1", "CB2")
    failed = check_steps.check(CPU, _keep(saved), ("data",), ("gcn",), variants)
    assert failed == ["gcn on data: a trial of L1 failed: why"]
    assert len(saved) == 4
    found = saved[-1]["datasets"]["data"]["gcn"]
    assert [*found["variants"]] == [*variants] and found["variants"]["CB2"] is None
    assert "curve" not in found["variants"]["stock"]
    assert found["bytes"] == {
        "stock": {"told": 985, "held": 1000, "off": -0.015, "within": True},
        "lossless": {"told": 110, "held": 100, "off": 0.1, "within": False},
    }


def test_bytes_that_were_not_measured_are_left_out() -> None:
    on_cpu = {"held_bytes": None, "raw_bytes": 1, "saved_bytes": 1}
    assert check_steps.account({"lossless": on_cpu, "L1": None}) == {}
    assert check_steps.account({"stock": {"held_bytes": 5}, "L1": {"error": "x"}}) == {}


def test_parts_are_modules_with_the_flags_they_take(monkeypatch: pytest.MonkeyPatch) -> None:
    assert [*gpu_check.PARTS] == [
        *("kernels", "memcheck", "racecheck", "table", "tests"),
        *("lossless", "steps", "swap", "scaling"),
    ]
    sanitizer = gpu_check.PARTS["memcheck"]
    assert sanitizer.command[:3] == ["compute-sanitizer", "--tool", "memcheck"]
    monkeypatch.setattr(gpu_check.shutil, "which", lambda name: None)
    assert not sanitizer.is_there() and gpu_check.PARTS["kernels"].is_there()
    for part in gpu_check.PARTS.values():
        assert ("--device" in part.flags) == part.module.startswith("experiments.")
    assert gpu_check.PARTS["scaling"].folder and gpu_check.PARTS["swap"].folder


def test_each_part_runs_and_what_it_had_is_kept(tmp_path: Path, monkeypatch, capsys) -> None:
    scripts = {
        "good": "print('{\"a\": 1}', file=open(sys.argv[2], 'w'))",
        "bad": "print('{\"a\": 2}', file=open(sys.argv[2], 'w')); raise ValueError('half way')",
        "folder": "import os; os.mkdir(sys.argv[2])",
    }
    fake = tmp_path / "experiments"
    fake.mkdir()
    for name, text in scripts.items():
        (fake / f"{name}.py").write_text(f"import sys\n{text}\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("PYTHONPATH", raising=False)
    monkeypatch.setattr(
        gpu_check.importlib.util, "find_spec", lambda name: None if "none" in name else name
    )
    names = ("bad", "none", "good")
    parts = {name: Part(f"experiments.{name}", ()) for name in names}
    parts["folder"] = Part("experiments.folder", (), folder=True)
    out = tmp_path / "out"
    found = run_parts(parts, out)
    content = json.loads((out / gpu_check.FILE_NAME).read_text())
    assert content["parts"] == found and content["versions"]["torch"] == torch.__version__
    states = {name: outcome["state"] for name, outcome in found.items()}
    assert states == {"bad": "failed", "none": "not there", "good": "done", "folder": "done"}
    assert found["bad"]["error"] == "ValueError: half way" and found["bad"]["found"] == {"a": 2}
    assert found["good"]["found"] == {"a": 1} and "error" not in found["good"]
    assert sorted(path.name for path in out.iterdir()) == ["folder", gpu_check.FILE_NAME]
    assert "failed ValueError: half way" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("outcome", "code"), [("done", 0), ("not there", 0), ("failed", 1)], ids=str
)
def test_the_exit_code_tells_of_failures(
    outcome: str, code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys
) -> None:
    seen: list[str] = []

    def run(parts: dict[str, Part], out: Path) -> dict[str, Any]:
        seen.extend(parts)
        return {name: {"state": outcome} for name in parts}

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(gpu_check, "run_parts", run)
    assert gpu_check.main(["--parts", "table,swap", "--out", str(tmp_path)]) == code
    assert seen == ["table", "swap"]
    assert ("failed: table, swap; see" in capsys.readouterr().err) == bool(code)


def test_without_a_gpu_one_line_says_so(tmp_path: Path, monkeypatch, capsys) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert gpu_check.main(["--out", str(tmp_path / "out")]) == 2
    text = capsys.readouterr().err
    assert text.startswith("gpu_check: Expected a CUDA device that torch sees (got none)")
    assert text.count("\n") == 1 and not (tmp_path / "out").exists()
    assert gpu_check.main(["--parts", "all", "--out", str(tmp_path)]) == 2
    assert "Expected --parts of kernels, memcheck, racecheck" in capsys.readouterr().err


def test_a_part_by_its_own_command(tmp_path: Path, monkeypatch, capsys) -> None:
    monkeypatch.setattr(check_steps, "run_trial", lambda specification: None)
    out = tmp_path / "steps.json"
    assert check_steps.main(["--device", "cpu", "--out", str(out)]) == 0
    assert [*json.loads(out.read_text())["datasets"]] == [*check_steps.DATASETS]

    def fails(specification: Specification) -> None:
        raise ExperimentError("no luck")

    monkeypatch.setattr(check_steps, "run_trial", fails)
    assert check_steps.main(["--device", "cpu", "--out", str(out)]) == 1
    told = "check_steps: 30 failed, the first: gcn on synthetic:ogbn-arxiv: no luck\n"
    assert capsys.readouterr().err == told


def test_gpus_by_name_and_driver(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert gpus() == []
    tool = tmp_path / "nvidia-smi"
    tool.write_text("#!/bin/sh\necho 'NVIDIA H200, 580.159.03, 143771 MiB'\n")
    tool.chmod(0o755)
    name, driver, memory = "NVIDIA H200", "580.159.03", "143771 MiB"
    assert gpus() == [{"name": name, "driver_version": driver, "memory.total": memory}]
