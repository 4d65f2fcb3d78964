"""Kills of a run of several seeds, then the same command again: no seed is lost or changed."""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from beside import amount
from experiments_samples import small_graph

from experiments.save_graph import save

pytestmark = pytest.mark.long

ROOT = Path(__file__).resolve().parents[2]
KILLS, SEEDS = amount(8, 20), 8
# What a clock or the process's history tells, and no training.
MEASURED = ("peak_bytes", "epoch_seconds", "train_seconds", "measuring_seconds")


# Imports take seconds, a job of this size far less: a process that has them already forks for each
# line of arguments, so that a kill meets the training and not an import.
SERVER = """
import json, os, sys
from experiments import node_cls
from experiments.helpers import plot
plot.require_matplotlib()
for line in sys.stdin:
    out, *arguments = json.loads(line)
    pid = os.fork()
    if pid == 0:
        for number, name in ((1, os.devnull), (2, out + ".errors")):
            os.dup2(os.open(name, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), number)
        os._exit(node_cls.main([*arguments, "--out", out]))
    print(pid, flush=True)
    print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), flush=True)
"""


class Jobs:
    """Runs one job after another on the same small graph."""

    def __init__(self, server: subprocess.Popen[str], data: str) -> None:
        assert server.stdin is not None and server.stdout is not None
        self._in, self._out = server.stdin, server.stdout
        self._flags = ["--model", "gat", "--bits", "2", "--dataset", data, "--device", "cpu"]
        self._flags += ["--seeds", f"0-{SEEDS - 1}", "--epochs", "4", "--hidden", "16"]

    def run(self, out: Path, kill_after: float | None = None) -> int:
        """The exit code; minus the signal's number of one that was killed (seconds)."""
        print(json.dumps([str(out), *self._flags]), file=self._in, flush=True)
        pid = int(self._out.readline())
        if kill_after is not None:
            time.sleep(kill_after)
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        code = int(self._out.readline())
        errors = Path(f"{out}.errors")
        if errors.exists():  # one that was killed at once has not opened it
            assert "Traceback" not in errors.read_text()
        return code


@pytest.fixture(scope="module")
def jobs(tmp_path_factory: pytest.TempPathFactory):
    path = tmp_path_factory.mktemp("data") / "small.npz"
    save(small_graph(), path)
    with subprocess.Popen(
        [sys.executable, "-c", SERVER],
        cwd=ROOT,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as server:
        yield Jobs(server, str(path))
        assert server.stdin is not None
        server.stdin.close()


def runs(out: Path) -> list[dict[str, Any]]:
    path = out / "result.json"
    if not path.exists():
        return []
    found: list[dict[str, Any]] = json.loads(path.read_text())["runs"]
    return found


def test_kills(jobs: Jobs, tmp_path: Path) -> None:
    undisturbed, out = tmp_path / "undisturbed", tmp_path / "killed"
    assert jobs.run(tmp_path / "first") == 0  # builds the kernels, where they are not there yet
    begun = time.monotonic()
    assert jobs.run(undisturbed) == 0
    whole = time.monotonic() - begun

    rng = random.Random(0)
    outs, kills = [out], 0
    kept: list[dict[str, Any]] = []
    while kills < KILLS:
        code = jobs.run(out, kill_after=rng.uniform(0.02, 0.6) * whole)
        assert code in (0, -signal.SIGKILL)
        kills += code != 0
        now = runs(out)
        # What was done stays done: nothing is trained again.
        assert now[: len(kept)] == kept
        kept = now
        if code == 0:
            out = tmp_path / f"killed{len(outs)}"
            outs.append(out)
            kept = []
    assert jobs.run(out) == 0

    expected = [strip(run) for run in runs(undisturbed)]
    assert [run["seed"] for run in expected] == list(range(SEEDS))
    for folder in outs:
        assert [strip(run) for run in runs(folder)] == expected
        names = {path.name for path in folder.iterdir()}
        assert names == {"result.json", "report.md", "curves.png"}


def strip(run: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in run.items() if key not in MEASURED}
