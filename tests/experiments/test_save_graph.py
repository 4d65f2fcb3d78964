"""Graphs written as one file."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from datasets import load
from experiments.save_graph import main


def test_the_file_holds_the_graph(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    spec, path = "synthetic:ogbn-arxiv@0.003", tmp_path / "new" / "small.npz"
    assert main(["--dataset", spec, "--out", str(path)]) == 0
    made, read = load(spec, "data"), load(str(path), "data")
    for key in ("x", "edge_index", "y", "train_idx", "val_idx", "test_idx"):
        assert torch.equal(getattr(made, key), getattr(read, key)), key
    assert [p.name for p in path.parent.iterdir()] == ["small.npz"]
    # What is there is not made again.
    changed = path.stat().st_mtime_ns
    assert main(["--dataset", spec, "--out", str(path)]) == 0
    assert path.stat().st_mtime_ns == changed and "exists already" in capsys.readouterr().out


def test_a_place_that_refuses(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").write_text("")
    flags = ["--dataset", "digits", "--out"]
    assert main([*flags, str(tmp_path / "file" / "g.npz")]) == 1
    assert "Expected to be able to write" in capsys.readouterr().err
    assert main([*flags, str(tmp_path / "g.json")]) == 2
    assert "Expected --out to end in .npz" in capsys.readouterr().err
