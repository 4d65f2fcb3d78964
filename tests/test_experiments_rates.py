from __future__ import annotations

import gc
import json
import weakref
from pathlib import Path

import pytest
from experiments_samples import small_graph

from experiments import rates
from experiments.data import prepare
from experiments.errors import ExperimentError
from experiments.rates import account, accounts, check_raw_bytes, main
from experiments.subjects import SUBJECTS
from gact_graph.report import Report, Row


def report(**raw: int) -> Report:
    """One context a slot, with these raw bytes."""
    return Report([Row(slot, "node", "keep", (1,), 1, None, n, n) for slot, n in raw.items()])


def test_table_and_file_hold_every_model_and_level(tmp_path: Path, monkeypatch, capsys) -> None:
    monkeypatch.setattr(rates, "load", lambda spec, root: small_graph())
    out = tmp_path / "rates.json"
    assert main(["--models", "gcn,gat", "--bits", "4,2", "--out", str(out)]) == 0
    text = capsys.readouterr().out
    for words in ("MB", "stock", "lossless", "L1 4 bit", "L1 2 bit"):
        assert words in text
    assert "convs.0" not in text
    content = json.loads(out.read_text())
    assert content["bits"] == [4, 2]
    assert list(content["models"]) == ["gcn", "gat"]
    for levels in content["models"].values():
        assert list(levels) == ["L0", "lossless", "L1 4 bit", "L1 2 bit"]
        stored = [level["stored_bytes"] for level in levels.values()]
        assert stored == sorted(stored, reverse=True) and stored[3] < stored[2] < stored[0]
        assert {level["raw_bytes"] for level in levels.values()} == {stored[0]}
        assert levels["L1 2 bit"]["rate"] == stored[0] / stored[3]
        assert f"{stored[0] / 1e6:.1f}" in text
        assert f"{levels['L1 2 bit']['rate']:.2f}x" in text
        assert all(level["contexts"] for level in levels.values())


def test_details_show_every_report(monkeypatch, capsys) -> None:
    monkeypatch.setattr(rates, "load", lambda spec, root: small_graph())
    assert main(["--models", "gcn", "--bits", "2", "--details"]) == 0
    text = capsys.readouterr().out
    for words in ("gcn, stock", "gcn, lossless", "gcn, L1 2 bit"):
        assert words in text
    assert text.count("saved for backward in the last forward") == 3


def test_models_go_before_the_next_one_comes(monkeypatch) -> None:
    alive: weakref.WeakSet = weakref.WeakSet()
    real = rates.make

    def watched(subject, task):
        assert not alive
        model = real(subject, task)
        alive.add(model)
        return model

    monkeypatch.setattr(rates, "make", watched)
    task = prepare(small_graph(), "edge_index")
    gc.disable()  # they shall go by themselves, not with the next collection
    try:
        accounts("gat", task, [("L0", 32), ("lossless", 32), ("L1", 4)])
        assert not alive
    finally:
        gc.enable()


def test_account_is_of_a_training_forward() -> None:
    found = account(SUBJECTS["gcn"], prepare(small_graph(), "csr"), "L1", 4)
    assert any("dropout" in row.slot for row in found.contexts)


def test_raw_bytes_that_differ_are_told_by_slot() -> None:
    same = report(a=5, b=7)
    check_raw_bytes("gat", {"L0": same, "lossless": report(b=7, a=5)})
    with pytest.raises(ExperimentError) as caught:
        check_raw_bytes("gat", {"L0": same, "lossless": same, "L1 4 bit": report(a=5, c=1)})
    assert str(caught.value) == (
        "Expected the same raw bytes of gat at every level (got 6 at L1 4 bit and 12 at L0: "
        "b 0 instead of 7, c 1 instead of 0)"
    )
    with pytest.raises(ExperimentError, match=r"c 9 instead of 3 and 1 more\)"):
        check_raw_bytes("gat", {"L0": report(a=1, b=2, c=3, d=4), "x": report(a=7, b=8, c=9, d=1)})


@pytest.mark.parametrize(
    ("line", "code", "words"),
    [
        ("--models gin", 2, "gat, gatv2, transformer, gcnii (got 'gin')"),
        ("--bits 17", 2, "Expected widths from low to high, 1 to 16"),
        ("--dataset nosuch", 1, "nosuch"),
    ],
)
def test_mistakes_end_in_one_line(line: str, code: int, words: str, capsys) -> None:
    assert main(line.split()) == code
    text = capsys.readouterr().err
    assert text.startswith("rates: ") and words in text
    assert text.count("\n") == 1
