from __future__ import annotations

import json
import statistics
from pathlib import Path

import pytest
import torch
from experiments_samples import small_graph

from experiments import step_time
from experiments.step_time import SUBJECTS, main


def test_times_every_model(tmp_path: Path, monkeypatch, capsys) -> None:
    monkeypatch.setattr(step_time, "load", lambda spec, root: small_graph())
    out = tmp_path / "times.json"
    flags = ["--models", ",".join(SUBJECTS), "--rounds", "3", "--bits", "2", "--out", str(out)]
    assert main(flags) == 0
    text = capsys.readouterr().out
    assert f"{torch.get_num_threads()} threads" in text
    assert "L1 2 bit" in text
    content = json.loads(out.read_text())
    assert (content["bits"], content["rounds"]) == (2, 3)
    assert content["models"].keys() == SUBJECTS.keys()
    for timing in content["models"].values():
        seconds = timing["seconds"]
        assert {name: len(times) for name, times in seconds.items()} == {
            "fp32": 3,  # the warm-up is not among them
            "compressed": 3,
        }
        medians = {name: statistics.median(times) for name, times in seconds.items()}
        assert timing["median_seconds"] == medians
        assert timing["ratio"] == medians["compressed"] / medians["fp32"]


def test_models_are_those_of_the_design() -> None:
    gcn, gat = (SUBJECTS[name].make(128, 40) for name in ("gcn", "gat"))
    assert [conv.out_channels for conv in gcn.convs] == [256, 256, 40]
    assert [(conv.heads, conv.out_channels) for conv in gat.convs] == [(3, 64), (3, 64), (3, 40)]
    assert SUBJECTS["gcn-edge_index"].make(128, 40).convs[0].normalize


@pytest.mark.parametrize(
    ("line", "code", "words"),
    [
        ("--models gcn,gin", 2, "Expected --models of gcn, gcn-edge_index, gat (got 'gin')"),
        ("--rounds 0", 2, "Expected a whole number of at least 1"),
        ("--dataset nosuch", 1, "nosuch"),
    ],
)
def test_mistakes_end_in_one_line(line: str, code: int, words: str, capsys) -> None:
    assert main(line.split()) == code
    text = capsys.readouterr().err
    assert words in text
    assert text.count("\n") == 1
