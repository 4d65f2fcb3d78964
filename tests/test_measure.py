"""The script that repeats the measurements of an older library."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from repository import commit, git

SCRIPT = Path(__file__).resolve().parent.parent / ".ci" / "measure.py"

EXPERIMENT = """
import json, os, sys
from pathlib import Path
out = Path(sys.argv[sys.argv.index("--out") + 1])
if "--fail" in sys.argv:
    raise SystemExit(1)
if out.suffix != ".json":
    (out / "part").mkdir(parents=True)
    (out / "part" / "scaling.json").write_text("{}")
names = "OMP_NUM_THREADS", "OMP_WAIT_POLICY", "MALLOC_CONF", "CUDA_VISIBLE_DEVICES"
for name in sys.argv[1].split(","):
    content = {"seen": sys.argv[2], "commit": "new"} | {n: os.environ.get(n) for n in names}
    file = out if out.suffix == ".json" else out / f"{name}.json"
    file.write_text(json.dumps(content))
"""


@pytest.fixture(autouse=True)
def checkout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    git("init", "--initial-branch", "main")
    for folder in ("gact_graph", "csrc", "experiments", "results/memory", "bin"):
        Path(folder).mkdir(parents=True)
    monkeypatch.setenv("OMP_WAIT_POLICY", "active")
    monkeypatch.setenv("MALLOC_CONF", "background_thread:true")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    Path("gact_graph/code.py").write_text("a = 1")
    Path("experiments/memory.py").write_text(EXPERIMENT)
    old = commit()
    Path("gact_graph/code.py").write_text("a = 2")
    new = commit()
    for name, flags, at in [
        ("gat", "another_name DATA/cora.npz", old),
        ("gcn", "gcn,gin DATA/cora.npz", f"{old}+changes"),
        ("gin", "gcn,gin DATA/cora.npz", old),
        ("kept", "kept DATA/cora.npz", new),
        ("wrong", "wrong --fail", old),
        ("gpu", "gpu --device cuda", old),
        ("file", "file DATA/cora.npz", old),
    ]:
        out = "FILE.json" if name == "file" else "DIR"
        command = f"python -m experiments.memory {flags} --out {out}"
        content = {"command": command, "threads": 1, "commit": at}
        Path(f"results/memory/{name}.json").write_text(json.dumps(content))
    Path("bin/git").symlink_to(str(shutil.which("git")))  # and no nvidia-smi
    command = "python -m experiments.memory studies DATA/cora.npz --out DIR"
    study = {"command": command, "config": {"threads": 3}}
    studies = {"a": study | {"commit": new}, "b": study | {"commit": old}}
    Path("results/memory/studies.json").write_text(json.dumps(studies))


def measure(*arguments: str) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"PYTHONPATH": os.getcwd(), "PATH": os.path.abspath("bin")}
    run = [sys.executable, str(SCRIPT), *arguments]
    return subprocess.run(run, capture_output=True, text=True, env=environment)


def seen(name: str) -> dict[str, object]:
    found: dict[str, object] = json.loads(Path(f"results/memory/{name}.json").read_text())
    return found


def test_files_of_an_older_library_are_replaced() -> None:
    done = measure("/graphs", "memory")
    assert done.returncode == 1
    assert "results/memory/wrong.json: not replaced: exit code 1" in done.stderr
    for name, threads in {"gat": "1", "gcn": "1", "gin": "1", "file": "1", "studies": "3"}.items():
        found = seen(name)
        assert (found["seen"], found["commit"]) == ("/graphs/cora.npz", "new")
        assert found["OMP_NUM_THREADS"] == threads
        assert found["OMP_WAIT_POLICY"] is found["MALLOC_CONF"] is None
    assert all("command" in seen(name) for name in ("kept", "wrong", "gpu"))


def test_a_command_runs_in_the_environment_of_its_file() -> None:
    path, tool = Path("results/memory/file.json"), Path("bin/nvidia-smi")
    path.write_text(json.dumps(seen("file") | {"environment": {"OMP_WAIT_POLICY": "passive"}}))
    tool.write_text("#!/bin/sh")
    tool.chmod(0o755)
    assert measure("/graphs", "file", "gpu").returncode == 0
    for name, policy, gpus in (("file", "passive", ""), ("gpu", None, "0")):
        found = seen(name)
        assert (found["OMP_WAIT_POLICY"], found["CUDA_VISIBLE_DEVICES"]) == (policy, gpus)


def test_words_choose_files() -> None:
    assert measure("/graphs", "gat").returncode == 0
    assert seen("gat")["commit"] == "new" and "command" in seen("gcn")


def test_a_command_runs_once_for_all_its_files() -> None:
    path = Path("experiments/memory.py")
    path.write_text(path.read_text() + 'open("runs", "a").write(sys.argv[1] + chr(10))\n')
    assert measure("/graphs", "gcn", "gin").returncode == 0
    assert Path("runs").read_text() == "gcn,gin\n"


def test_a_folder_is_needed() -> None:
    done = measure()
    assert done.returncode == 1 and "Expected a folder with the graphs" in done.stderr
