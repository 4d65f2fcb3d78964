from __future__ import annotations

import json
import statistics
import time
from pathlib import Path

import pytest
import torch
from experiments_samples import small_graph

from experiments import step_time
from experiments.helpers import subjects
from experiments.helpers.busy import BusyLoops
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
    assert content["command"].startswith("python -m experiments.step_time --models")
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
        lambda model, *how, **options: (
            wrapped.append((model, *how)) or subjects.wrap_at(model, *how, **options)
        ),
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
    # Two steps in a row, of which the second is timed.
    in_turn = [model for model in (stock, lossless, quantized) for _ in range(2)]
    assert [id(model) for model in taken] == 2 * [id(model) for model in in_turn]
    assert "forward" not in vars(stock)
    assert torch.equal(weights[0], weights[2]) and torch.equal(weights[0], weights[4])


def test_busy_processes_run_beside_their_own_jobs_only() -> None:
    def come_to(what: str) -> bool:
        for _ in range(1000):  # a signal takes a moment
            told = [Path(f"/proc/{one.pid}/stat").read_text() for one in loops._processes]
            if {text.rpartition(")")[2].split()[0] for text in told} <= {*what}:
                return True
            time.sleep(0.01)
        return False

    with BusyLoops(2) as loops:
        processes = [*loops._processes]
        assert len(processes) == 2
        assert come_to("T")
        assert loops.beside(lambda: come_to("RS"))()
        assert come_to("T")
        with pytest.raises(ZeroDivisionError):
            loops.beside(lambda: 1 / 0)()
        assert come_to("T")
    assert all(process.returncode for process in processes)


def test_tells_how_much_slower_each_is_beside_busy_processes(tmp_path, monkeypatch, capsys) -> None:
    monkeypatch.setattr(step_time, "load", lambda spec, root: small_graph())
    out = tmp_path / "times.json"
    flags = ["--models", "gcn", "--rounds", "1", "--out", str(out)]
    flags += ["--busy", "1", "--blocks", "auto"]
    assert main(flags) == 0
    assert "busy" in capsys.readouterr().out
    content = json.loads(out.read_text())
    assert (content["busy"], content["blocks"]) == (1, "auto")
    timing = content["models"]["gcn"]
    medians = timing["median_seconds"]
    assert timing["slowdown"] == {
        name: medians[f"{name}, busy"] / medians[name] for name in ("fp32", "L1")
    }


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
