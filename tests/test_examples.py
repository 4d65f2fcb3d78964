"""Each example runs for one epoch on a small graph, outside of pytest, as a user runs it."""

from __future__ import annotations

import ast
import importlib.util
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from experiments.helpers import metis

ROOT = Path(__file__).resolve().parent.parent
EXAMPLES = sorted((ROOT / "examples").glob("*.py"))

OF_NEIGHBORS = ("neighbor_loader", "link_prediction", "hetero_loader")
OF_SUBGRAPHS = ("graph_saint", "shadow")
NEEDS = {
    "lightning_trainer": ("lightning",),
    "accelerate_loop": ("accelerate",),
    "graphgym": ("lightning", "yacs"),
}
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]

# All in one process: importing torch and PyG takes longer than an example.
RUN = """
import contextlib, io, json, runpy, sys, traceback
from experiments.helpers import metis
metis.provide()
found = {}
for path in sys.argv[1:]:
    printed, told = io.StringIO(), io.StringIO()
    sys.argv = [path, "--epochs", "1", "--nodes", "300"]
    with contextlib.redirect_stdout(printed), contextlib.redirect_stderr(told):
        try:
            runpy.run_path(path, run_name="__main__")
            error = None
        except BaseException:
            error = traceback.format_exc()
    found[path] = {"printed": printed.getvalue(), "told": told.getvalue(), "error": error}
json.dump(found, open("found.json", "w"))
"""


def missing(example: str) -> str | None:
    """The missing packages of the example."""
    samplers = ("pyg_lib", "torch_sparse")
    if example in OF_NEIGHBORS and not any(map(importlib.util.find_spec, samplers)):
        return "PyG samples neighbors with pyg-lib or torch-sparse"
    if example in OF_SUBGRAPHS and importlib.util.find_spec("torch_sparse") is None:
        return "PyG samples subgraphs with torch-sparse"
    # torch-sparse from PyPI is built without METIS.
    if example == "cluster_loader" and not metis.is_there():
        return "PyG cuts graphs with METIS, which pyg-lib or pymetis would bring"
    absent = [name for name in NEEDS.get(example, ()) if importlib.util.find_spec(name) is None]
    return f"the example needs {' and '.join(absent)}" if absent else None


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = tmp_path_factory.mktemp("examples")
    paths = [str(path) for path in EXAMPLES if missing(path.stem) is None]
    environment = os.environ | {"PYTHONPATH": str(ROOT), "COLUMNS": "120"}
    command = [sys.executable, "-c", RUN, *paths]
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return json.loads((folder / "found.json").read_text(encoding="utf-8"))


@pytest.mark.long
@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_an_example_runs(path: Path, outcomes: Any) -> None:
    reason = missing(path.stem)
    if reason is not None:
        pytest.skip(reason)
    outcome = outcomes[str(path)]
    assert outcome["error"] is None, outcome["error"]
    assert "saved for backward in the last forward" in outcome["printed"]
    # On a slow machine, the library reports slow work in lines of this form.
    told = [line for line in outcome["told"].splitlines() if not line.startswith("gact_graph: ")]
    assert not any("gact_graph" in line for line in told), "a warning of ours"


@pytest.mark.long
@pytest.mark.parametrize("name", [*OF_NEIGHBORS, *OF_SUBGRAPHS, "cluster_loader"])
def test_an_example_names_missing_packages_in_a_line(name: str, tmp_path: Path) -> None:
    code = f"""
import runpy, sys
sys.modules |= {{"pyg_lib": None, "torch_sparse": None}}
sys.argv = ["example", "--nodes", "300"]
runpy.run_path({str(ROOT / "examples" / f"{name}.py")!r}, run_name="__main__")
"""
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-W", "ignore", "-c", code]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert done.returncode == 1
    assert "Traceback" not in done.stderr
    *_, said = done.stderr.splitlines()  # PyG says first that it begins to cut the graph
    assert said.startswith("PyG ") and "install" in said


@pytest.mark.long
def test_messages_by_hand_shows_the_savings_of_blocks_and_codes(outcomes: Any) -> None:
    printed = outcomes[str(ROOT / "examples" / "messages_by_hand.py")]["printed"]
    (rate,) = re.findall(r"\(([\d.]+)x less\)", printed)
    assert float(rate) > 5


def test_every_example_is_on_the_site() -> None:
    page = (ROOT / "docs" / "examples.md").read_text(encoding="utf-8")
    shown = re.findall(r'--8<-- "examples/(\w+)\.py"', page)
    assert sorted(shown) == [path.stem for path in EXAMPLES]


@pytest.mark.long
@pytest.mark.parametrize("name", ["data_parallel", "partitioned_graph", "fully_sharded", "elastic"])
def test_an_example_runs_in_two_processes(name: str, tmp_path: Path) -> None:
    example = str(ROOT / "examples" / f"{name}.py")
    done = in_two_processes([*TORCHRUN, example, "--epochs", "2", "--nodes", "300"], tmp_path)
    assert done.returncode == 0, done.stderr
    # Of rank 0 alone.
    assert done.stdout.count("epoch 1: loss") == 1
    assert done.stdout.count("saved for backward in the last forward") == 1
    assert ("sent to other processes" in done.stdout) == (name == "partitioned_graph")


@pytest.mark.long
def test_a_run_that_torchrun_restarts_has_the_losses_of_one_that_does_not_fail(
    tmp_path: Path,
) -> None:
    example = str(ROOT / "examples" / "elastic.py")
    # Large enough for compression.
    arguments = [example, "--epochs", "3", "--nodes", "20000"]
    fails = [*TORCHRUN, "--max-restarts", "1", *arguments, "--fail-after", "1"]
    outputs = []
    for command in ([*TORCHRUN, *arguments], fails):
        done = in_two_processes(command, tmp_path)
        assert done.returncode == 0, done.stderr
        outputs.append([line for line in done.stdout.splitlines() if line.startswith("epoch")])
    assert outputs[0] == outputs[1]
    assert len(outputs[0]) == 3


def in_two_processes(command: list[str], folder: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command,
        cwd=folder,
        env=os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=400,
    )


@pytest.mark.long
def test_a_resumed_run_ends_where_the_other_one_does(outcomes: Any) -> None:
    printed = outcomes[str(ROOT / "examples" / "resume.py")]["printed"]
    losses = dict(line.split(": ") for line in printed.splitlines() if line.startswith("loss of"))
    assert losses["loss of the run that went on"] == losses["loss of the run that was resumed"]


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_an_example_is_short_and_has_a_docstring(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    assert len(text.splitlines()) < 80
    docstring = ast.get_docstring(ast.parse(text))
    assert (
        docstring is not None and 2 <= sum(docstring.count(end) for end in (". ", ".\n")) + 1 <= 5
    )
    listed = (ROOT / "examples" / "README.md").read_text(encoding="utf-8")
    assert f"[{path.name}]({path.name})" in listed
