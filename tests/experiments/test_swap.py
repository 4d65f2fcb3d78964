"""The table of swapping: all of it but the numbers, which need a GPU."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import pytest
import torch
from experiments_samples import small_graph

import gact_graph
from experiments import swap
from experiments.helpers.data import prepare
from experiments.helpers.subjects import SUBJECTS
from experiments.swap import WAYS, main, measure, show_and_write


@pytest.mark.parametrize("name", WAYS)
def test_every_way_trains(name: str) -> None:
    subject = SUBJECTS["gat"]
    found = measure(subject, prepare(small_graph(), subject.layout), WAYS[name], 4, 2)
    assert len(found["seconds"]) == 2 and found["step_seconds"] > 0
    assert found["host_bytes"] == (None if name.startswith("fp32") else 0)


def test_prefetching_is_switched(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []

    def wrap_at(model: torch.nn.Module, level: str, bits: int) -> torch.nn.Module:
        gact_graph.wrap(model, bits, level=level, adaptive=False, min_bytes=0)
        seen.append(vars(model)["forward"].controller.swapping)
        return model

    monkeypatch.setattr(swap, "wrap_at", wrap_at)
    subject = SUBJECTS["gat"]
    task = prepare(small_graph(), subject.layout)
    for name in ("L1", "L2 without prefetch", "L2"):
        measure(subject, task, WAYS[name], 4, 1)
    assert [None if s is None else s.prefetch for s in seen] == [None, False, True]


def test_table_and_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = {
        name: {
            "held_bytes": (10 - i) * 10**8,
            "host_bytes": None if name.startswith("fp32") else i * 10**7,
            "peak_bytes": 2 * 10**9,
            "seconds": [0.5 + 0.1 * i],
            "step_seconds": 0.5 + 0.1 * i,
        }
        for i, name in enumerate(WAYS)
    }
    args = argparse.Namespace(
        model="gat", dataset="cora", bits=4, steps=1, device=torch.device("cuda"), out=tmp_path
    )
    show_and_write(found, args)
    text = capsys.readouterr().out
    for words in (*WAYS, "gat on cora, 4 bit", "1,000", "600", "40", "2,000", "0.900", "1.80x"):
        assert words in text
    content = json.loads((tmp_path / "swap.json").read_text())
    assert content["ways"] == found
    assert (content["model"], content["steps"], content["device"]) == ("gat", 1, "cuda")


@pytest.mark.parametrize(
    ("flags", "code", "words"),
    [
        ("--device cpu", 1, "Expected a CUDA device, which saved tensors could leave (got cpu)"),
        ("--device cpu --steps 0", 2, "Expected a whole number from 1 to 10^9"),
    ],
)
def test_what_cannot_be_measured(
    flags: str, code: int, words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    assert main([*flags.split(), "--out", str(out)]) == code
    text = capsys.readouterr().err
    assert words in text and text.count("\n") == 1
    assert not out.exists()


@pytest.mark.gpu
def test_end_to_end(tmp_path: Path) -> None:
    assert main(["--dataset", "digits", "--steps", "2", "--out", str(tmp_path)]) == 0
    ways = json.loads((tmp_path / "swap.json").read_text())["ways"]
    assert [*ways] == [*WAYS]
    assert ways["L2"]["host_bytes"] >= 0
