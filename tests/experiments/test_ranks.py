"""Mini-batches, and several processes that train one model on them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from experiments_samples import small_graph

from experiments.helpers.data import layout_of, prepare
from experiments.helpers.errors import UsageError
from experiments.helpers.options import parse
from experiments.helpers.sampling import make_sampler

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
        for batch in make_sampler("cluster", task, 2, rank, 3).epoch(1):
            assert batch.adjacency.layout == task.adjacency.layout
            features.append(batch.x[batch.train_idx])
            learning += len(batch.train_idx)
    found, whole = torch.cat(features), task.x[task.train_idx]
    assert learning == len(task.train_idx)
    assert torch.equal(found.sort(0).values, whole.sort(0).values)


def test_several_processes_write_one_table(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += ["--nproc-per-node", "2", "-m", "experiments.node_cls", *SMALL]
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [*command, "--out", str(tmp_path)],
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("GAT on digits, 4 bit (L1)") == 1
    assert done.stdout.count("test accuracy") == 1
    content = json.loads((tmp_path / "result.json").read_text())
    assert (content["config"]["sampler"], content["config"]["processes"]) == ("cluster", 2)
    assert len(content["runs"][0]["loss"]) == 2


def test_several_processes_need_a_sampler(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(UsageError, match=r"Expected --sampler under torchrun \(got 2 processes"):
        parse(["--model", "gcn", "--bits", "4"])
