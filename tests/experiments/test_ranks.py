"""Mini-batches, and several processes that train one model on them."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from experiments_samples import small_graph
from fresh import Fresh, module

from experiments.helpers.data import layout_of, prepare
from experiments.helpers.errors import UsageError
from experiments.helpers.sampling import cut, make_sampler
from experiments.node_cls import main

ROOT = Path(__file__).resolve().parents[2]
SMALL = [
    "--model",
    "gat",
    "--bits",
    "4",
    "--seeds",
    "0",
    "--epochs",
    "2",
    "--hidden",
    "8",
    "--sampler",
    "cluster",
]


@pytest.mark.parametrize("model", ["gat", "gcn"])
def test_clusters_of_all_ranks_are_the_graph(model: str) -> None:
    task = prepare(small_graph(), layout_of(model))
    features, learning = [], 0
    for rank in range(3):
        for batch in make_sampler("cluster", task, 2, rank, 3)(1):
            assert batch.adjacency.layout == task.adjacency.layout
            features.append(batch.x[batch.train_idx])
            learning += len(batch.train_idx)
    found, whole = torch.cat(features), task.x[task.train_idx]
    assert learning == len(task.train_idx)
    assert torch.equal(found.sort(0).values, whole.sort(0).values)


def run_two(*flags: str) -> str:
    """What two processes print, with the variables that torchrun would set."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    variables = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": "2"}
    environment = os.environ | variables | {"OMP_NUM_THREADS": "1"}
    ranks = [
        Fresh(module("experiments.node_cls"), *flags, environment=environment | {"RANK": rank})
        for rank in "01"
    ]
    try:
        outputs = [rank.communicate(300) for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    assert [rank.returncode for rank in ranks] == [0, 0], outputs
    return "".join(out for out, _ in outputs)


def torchrun_two(*flags: str) -> str:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += ["--nproc-per-node", "2", "-m", "experiments.node_cls", *flags]
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize("run", [run_two, torchrun_two], ids=["two", "torchrun"])
@pytest.mark.long
def test_several_processes_write_one_table(run: Callable[..., str], tmp_path: Path) -> None:
    printed = run(*SMALL, "--out", str(tmp_path))
    assert printed.count("GAT on digits, 4 bit (L1)") == 1
    assert printed.count("test accuracy") == 1
    content = json.loads((tmp_path / "result.json").read_text())
    assert (content["config"]["sampler"], content["config"]["processes"]) == ("cluster", 2)
    assert len(content["runs"][0]["loss"]) == 2


def test_parts_of_the_graph_give_what_the_whole_gives(tmp_path: Path) -> None:
    line = "--model gat --bits 32 --level lossless --seeds 0 --epochs 4 --hidden 8 --dropout 0"
    printed = run_two(*line.split(), "--partition", "metis", "--out", str(tmp_path / "parts"))
    assert printed.count("GAT on digits, fp32 (lossless)") == 1
    assert main([*line.split(), "--out", str(tmp_path / "whole")]) == 0
    parts, whole = (
        json.loads((tmp_path / name / "result.json").read_text()) for name in ("parts", "whole")
    )
    assert (parts["config"]["partition"], parts["config"]["processes"]) == ("metis", 2)
    [found], [expected] = parts["runs"], whole["runs"]
    # Sums come in another order, which Adam's division magnifies.
    assert found["loss"] == pytest.approx(expected["loss"], rel=1e-3)
    for key in ("val_score", "test_score"):
        assert found[key] == pytest.approx(expected[key], abs=0.01)
    assert found["raw_bytes"] < 0.7 * expected["raw_bytes"]
    printed = run_two(
        *line.split(), "--partition", "metis", "--halo-bits", "4", "--out", str(tmp_path / "coded")
    )
    coded = json.loads((tmp_path / "coded" / "result.json").read_text())
    assert coded["config"]["halo_bits"] == 4 and parts["config"]["halo_bits"] == 32
    assert coded["runs"][0]["loss"] != found["loss"]
    assert coded["runs"][0]["loss"] == pytest.approx(found["loss"], rel=0.1)


def test_missing_packages_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    task = prepare(small_graph(), "edge_index")
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(UsageError, match="pyg-lib or torch-sparse for --sampler neighbor"):
        make_sampler("neighbor", task, 2, 0, 1)
    with pytest.raises(UsageError, match="pymetis for --partition metis"):
        cut(task.adjacency, 60, "metis", 2)
