from __future__ import annotations

import json
import statistics
from pathlib import Path

import pytest
import torch
from experiments_samples import small_graph

from experiments import step_time
from experiments.helpers import subjects
from experiments.helpers.subjects import SUBJECTS
from experiments.step_time import main, time_model


def test_times_every_model_at_every_level(tmp_path: Path, monkeypatch, capsys) -> None:
    monkeypatch.setattr(step_time, "load", lambda spec, root: small_graph())
    out = tmp_path / "times.json"
    flags = ["--models", ",".join(SUBJECTS), "--rounds", "3", "--bits", "2", "--out", str(out)]
    assert main([*flags, "--levels", "lossless,L1"]) == 0
    text = capsys.readouterr().out
    assert f"{torch.get_num_threads()} threads" in text
    assert "lossless, s" in text and "L1 2 bit, s" in text
    content = json.loads(out.read_text())
    assert (content["bits"], content["rounds"]) == (2, 3)
    assert content["levels"] == ["lossless", "L1"]
    assert content["models"].keys() == SUBJECTS.keys()
    for timing in content["models"].values():
        seconds = timing["seconds"]
        assert {name: len(times) for name, times in seconds.items()} == {
            "fp32": 3,  # the warm-up is not among them
            "lossless": 3,
            "L1": 3,
        }
        medians = {name: statistics.median(times) for name, times in seconds.items()}
        assert timing["median_seconds"] == medians
        assert timing["ratio"] == {
            level: medians[level] / medians["fp32"] for level in ("lossless", "L1")
        }


def test_level_is_l1_by_default(monkeypatch, capsys) -> None:
    monkeypatch.setattr(step_time, "load", lambda spec, root: small_graph())
    assert main(["--models", "gcn", "--rounds", "1"]) == 0
    text = capsys.readouterr().out
    assert "L1 4 bit, s" in text and "lossless" not in text


def test_copies_are_wrapped_once_each_and_stock_stays_stock(monkeypatch) -> None:
    wrapped = []
    monkeypatch.setattr(
        step_time,
        "wrap_at",
        lambda model, *how: wrapped.append((model, *how)) or subjects.wrap_at(model, *how),
    )
    taken, weights = [], []
    real = step_time.training_step

    def watched(model, *rest):
        taken.append(model)
        weights.append(next(model.parameters()).detach().clone())
        return real(model, *rest)

    monkeypatch.setattr(step_time, "training_step", watched)
    device = torch.device("cpu")
    time_model(SUBJECTS["gcn"], small_graph(), ["lossless", "L1"], 4, 1, device)
    (lossless, *how), (quantized, *other) = wrapped
    assert (how, other) == (["lossless", 4], ["L1", 4])
    stock = taken[0]
    assert [id(model) for model in taken] == 2 * [id(stock), id(lossless), id(quantized)]
    assert "forward" not in vars(stock)
    assert torch.equal(weights[0], weights[1]) and torch.equal(weights[0], weights[2])


@pytest.mark.parametrize(
    ("line", "code", "words"),
    [
        ("--models gcn,gin", 2, "gcnii, gcnii-edge_index (got 'gin')"),
        ("--levels L1,L3", 2, "Expected --levels of L0, lossless, L1, L2, CB1, CB2 (got 'L3')"),
        ("--rounds 0", 2, "Expected a whole number from 1 to 10^9"),
        ("--dataset nosuch", 1, "nosuch"),
    ],
)
def test_mistakes_end_in_one_line(line: str, code: int, words: str, capsys) -> None:
    assert main(line.split()) == code
    text = capsys.readouterr().err
    assert words in text
    assert text.count("\n") == 1
