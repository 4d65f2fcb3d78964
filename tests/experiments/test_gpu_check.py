"""The parts of the GPU check, and how they run; none needs a GPU here."""

from __future__ import annotations

import importlib
import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from fresh import module, run

from experiments import gpu_check
from experiments.gpu_check import Part, run_parts
from experiments.helpers.origin import gpus

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize("name", gpu_check.PARTS)
def test_each_part_has_flags_that_its_command_takes(name: str, tmp_path: Path) -> None:
    words = gpu_check.PARTS[name].command(tmp_path, tmp_path)
    _, _, program, *flags = words[words.index(sys.executable) :][:3] + words[3:]
    if program == "pytest":
        paths = [flag.removeprefix("--ignore=") for flag in flags]
        paths = [path for path in paths if path.split("/")[0] == "tests"]
        assert paths and all((ROOT / path).exists() for path in paths)
        return
    args = importlib.import_module(program).main.parse([f.replace("cuda", "cpu") for f in flags])
    assert getattr(args, "device", torch.device("cpu")).type == "cpu"


def test_each_call_takes_nine_minutes_at_most() -> None:
    for call in gpu_check.CALLS:
        assert sum(part.seconds for part in call.values()) <= 540
    assert len(gpu_check.PARTS) == sum(map(len, gpu_check.CALLS))


@pytest.mark.long
def test_a_part_ends_in_time_and_its_children_with_it(tmp_path: Path, monkeypatch) -> None:
    number = tmp_path / "number"
    fake = tmp_path / "slow.py"
    fake.write_text(
        "import pathlib, subprocess, time\n"
        "child = subprocess.Popen(['sleep', '600'])\n"
        f"pathlib.Path({str(number)!r}).write_text(str(child.pid))\n"
        "print('half a ', flush=True)\n"
        "time.sleep(600)\n"
    )
    part = Part(f"{{python}} {fake}", seconds=8)
    [found] = run_parts({"slow": part}, tmp_path / "out", tmp_path).values()
    assert found["state"] == "out of time"
    assert (tmp_path / "out" / "slow.log").read_text() == "half a \n"
    child = Path("/proc", number.read_text())
    for _ in range(600):  # a busy machine takes its time to end a process
        if not child.exists() or "(zombie)" in (child / "status").read_text():
            break
        time.sleep(0.1)
    else:
        pytest.fail("the child still runs")


def test_the_tests_of_a_gpu_are_found(tmp_path: Path) -> None:
    """The part of the kernels picks tests that are there, none of them of the simulated GPU."""
    flags = ["--co", "-qq", "-p", "no:cacheprovider"]
    command = [*gpu_check.PARTS["kernels"].command(tmp_path / "out", tmp_path), *flags]
    assert command[:3] == [sys.executable, "-m", "pytest"]
    printed = run(module("pytest"), *command[3:])
    assert "test_on_device.py::test_quantizer" in printed
    assert "test_on_device.py::test_masks" in printed
    assert "test_weighted_sum.py::test_backward_as_autograd_in_float64[cuda-heads]" in printed
    assert "test_attention.py::test_as_autograd_in_float64[cuda-rows]" in printed
    # Those take the time of compilers, and say nothing of a GPU.
    for name in ("cuda-source", "every_kernel", "test_cuda_edges"):
        assert name not in printed


@pytest.mark.long
def test_the_report_of_tests_that_run_too_long_is_kept(tmp_path: Path) -> None:
    test = tmp_path / "test_slow.py"
    test.write_text(
        "import time, warnings\n"
        "warnings.warn('of another version', DeprecationWarning)\n"
        "def test_one():\n    pass\n"
        "def test_two():\n    time.sleep(600)\n"
    )
    (tmp_path / "pytest.ini").write_text("[pytest]\nfilterwarnings = error\nmarkers = gpu long\n")
    test.write_text(f"import pytest\npytestmark = pytest.mark.gpu\n{test.read_text()}")
    part = Part(
        f"{gpu_check._TESTS} -c {tmp_path / 'pytest.ini'} {test}", 60
    )  # a busy machine takes half a minute to start pytest
    [found] = run_parts({"tests": part}, tmp_path / "out", tmp_path).values()
    assert found["state"] == "out of time"
    assert 'name="test_one"' in (tmp_path / "out" / "tests").read_text()
    assert "test_one PASSED" in (tmp_path / "out" / "tests.log").read_text()


def test_the_slow_peer_comes_last() -> None:
    assert gpu_check._WAYS.endswith(",compiled")


def test_each_part_runs_and_its_output_is_kept(tmp_path: Path, capsys) -> None:
    scripts = {
        "bad": "print('{}', file=open(sys.argv[1], 'w')); raise ValueError('half way')",
        "good": "import os; os.mkdir(sys.argv[1]); print(os.environ['IT'])",
    }
    for name, text in scripts.items():
        (tmp_path / f"{name}.py").write_text(f"import sys\n{text}\n")
    parts = {name: Part(f"{{python}} {{data}}/{name}.py {{out}}") for name in scripts}
    parts["good"] = parts["good"]._replace(environment={"IT": "yes"})
    parts["none"] = Part("no-such-program {out}")
    out = tmp_path / "out"
    found = run_parts(parts, out, tmp_path)
    content = json.loads((out / gpu_check.FILE_NAME).read_text())
    assert content["parts"] == found and content["versions"]["torch"] == torch.__version__
    states = {name: outcome["state"] for name, outcome in found.items()}
    assert states == {"bad": "failed", "good": "done", "none": "not there"}
    assert found["bad"]["error"] == "ValueError: half way" and "error" not in found["good"]
    assert (out / "bad").is_file() and (out / "good").is_dir()
    assert (out / "good.log").read_text() == "yes\n"
    assert "failed ValueError: half way" in capsys.readouterr().out


def test_parts_of_other_calls_are_kept(tmp_path: Path) -> None:
    def run(name: str, text: str) -> dict[str, Any]:
        (tmp_path / "it.py").write_text(text)
        return run_parts({name: Part("{python} {data}/it.py")}, tmp_path, tmp_path)

    assert [*run("first", "raise SystemExit(1)")] == ["first"]
    assert [*run("second", "")] == ["second"]
    run("first", "")
    parts = json.loads((tmp_path / gpu_check.FILE_NAME).read_text())["parts"]
    states = {name: part["state"] for name, part in parts.items()}
    assert states == {"first": "done", "second": "done"}


def test_ctrl_c_ends_the_part(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    communicate, started = subprocess.Popen.communicate, []

    def interrupt(process: subprocess.Popen[str], *arguments: Any, **options: Any) -> Any:
        if process in started:
            return communicate(process, *arguments, **options)
        started.append(process)
        raise KeyboardInterrupt

    monkeypatch.setattr(subprocess.Popen, "communicate", interrupt)
    monkeypatch.setattr(gpu_check, "_GRACE_SECONDS", 1)
    with pytest.raises(KeyboardInterrupt):
        gpu_check._outcome(["sleep", "600"], Part("", 60), tmp_path / "log")
    [process] = started
    assert process.returncode  # not None: it has ended


@pytest.mark.parametrize(
    ("outcome", "code"),
    [("done", 0), ("not there", 1), ("failed", 1), ("out of time", 1)],
    ids=str,
)
def test_the_exit_code_tells_of_failures(
    outcome: str, code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys
) -> None:
    seen: list[str] = []

    def run(parts: dict[str, Part], out: Path, data: Path) -> dict[str, Any]:
        seen.extend(parts)
        return {name: {"state": outcome} for name in parts}

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(gpu_check, "run_parts", run)
    assert gpu_check.main(["--parts", "table,swap", "--out", str(tmp_path)]) == code
    assert seen == ["table", "swap"]
    assert ("failed or not run: table, swap; see" in capsys.readouterr().err) == bool(code)


def test_without_a_gpu_one_line_says_so(tmp_path: Path, monkeypatch, capsys) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert gpu_check.main(["--out", str(tmp_path / "out")]) == 2
    text = capsys.readouterr().err
    assert text.startswith("gpu_check: Expected a CUDA device that torch sees (got none)")
    assert text.count("\n") == 1
    assert gpu_check.main(["--parts", "all", "--out", str(tmp_path)]) == 2
    assert "Expected --parts of kernels, table, steps-gcn-ogbn-arxiv" in capsys.readouterr().err


def test_gpus_by_name_and_driver(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert gpus() == []
    tool = tmp_path / "nvidia-smi"
    tool.write_text("#!/bin/sh\necho 'NVIDIA H200, 580.159.03, 143771 MiB'\n")
    tool.chmod(0o755)
    name, driver, memory = "NVIDIA H200", "580.159.03", "143771 MiB"
    assert gpus() == [{"name": name, "driver_version": driver, "memory.total": memory}]
