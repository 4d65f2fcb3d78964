"""The table of overheads by size."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from datasets.published import Size
from datasets.synthetic import block_model
from experiments import overhead
from experiments.helpers.data import prepare
from experiments.helpers.subjects import make
from experiments.overhead import batches_of, main, time_steps


def test_a_row_for_each_size_and_one_for_mini_batches(tmp_path: Path, capsys) -> None:
    out = tmp_path / "overhead.json"
    flags = ["--models", "gat", "--nodes", "300,100", "--degree", "6", "--batch", "120"]
    assert main([*flags, "--rounds", "1", "--hidden", "5", "--out", str(out)]) == 0
    assert json.loads(out.read_text())["hidden"] == 5
    text = capsys.readouterr().out
    assert f"{torch.get_num_threads()} threads" in text
    assert "L1 4 bit" in text and "lossless" in text
    rows = json.loads(out.read_text())["models"]["gat"]
    assert [*rows] == [
        "full batch, 100 nodes",
        "full batch, 300 nodes",
        "mini-batches of 120 nodes",
    ]
    for timing in rows.values():
        medians = timing["median_seconds"]
        assert timing["ratio"]["L1"] == medians["L1"] / medians["fp32"]
    assert rows["full batch, 300 nodes"]["nodes"] == 300
    assert 0 < rows["mini-batches of 120 nodes"]["edges"] < rows["full batch, 300 nodes"]["edges"]


def test_models_get_the_width_that_was_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []

    def measure(subject: Any, graphs: Any, *rest: Any, **sizes: int) -> dict[str, Any]:
        model = make(subject, graphs[0], **sizes)
        seen.append(model.convs[0].out_channels)
        return time_steps(subject, graphs, *rest, **sizes)

    monkeypatch.setattr(overhead, "time_steps", measure)
    flags = ["--nodes", "100", "--degree", "6", "--rounds", "1", "--models", "sage,gat"]
    assert main([*flags, "--hidden", "5"]) == 0
    assert main(flags) == 0
    assert seen == [5, 5, 5, 5, 256, 256, 64, 64]


def test_mini_batches_are_subgraphs() -> None:
    task = prepare(block_model(Size(200, 2000, 4, 3)), "edge_index")
    batches = batches_of(task, 50, 3)
    edges = {(int(a), int(b)) for a, b in task.adjacency.t()}
    rows = {tuple(row.tolist()): i for i, row in enumerate(task.x)}
    for batch in batches:
        assert len(batch.x) == len(batch.y) == len(batch.train_idx) == 50
        nodes = [rows[tuple(row.tolist())] for row in batch.x]
        assert {(nodes[a], nodes[b]) for a, b in batch.adjacency.t().tolist()} == {
            (a, b) for a, b in edges if a in nodes and b in nodes
        }
        assert torch.equal(batch.y, task.y[nodes])
    assert not torch.equal(batches[0].x, batches[1].x)


@pytest.mark.parametrize("flags", [["--models", "gcn"], ["--nodes", "1,x"], ["--levels", "L3"]])
def test_flags_that_are_wrong(flags: list[str], capsys) -> None:
    assert main(flags) == 2
    assert "Expected" in capsys.readouterr().err
