from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
from experiments_samples import small_graph

from experiments import follow
from experiments.data import prepare
from experiments.follow import largest, losses, main, relative_differences
from experiments.subjects import SUBJECTS


@pytest.mark.parametrize("name", ["gcn", "gat"])
def test_exact_levels_follow_to_the_bit(name: str) -> None:
    task = prepare(small_graph(), SUBJECTS[name].layout)
    stock, exact = (losses(SUBJECTS[name], task, 4, level, 4) for level in (None, "lossless"))
    assert len(stock) == 4 and len(set(stock)) == 4
    assert exact == stock


def test_quantization_acts_from_the_first_backward_on() -> None:
    task = prepare(small_graph(), SUBJECTS["gat"].layout)
    stock, coarse = (losses(SUBJECTS["gat"], task, 3, level, 1) for level in (None, "L1"))
    assert coarse[0] == stock[0]  # forward is stock's, with the same weights and dropout
    assert coarse[1:] != stock[1:]


def test_table_and_file(tmp_path: Path, monkeypatch, capsys) -> None:
    monkeypatch.setattr(follow, "load", lambda spec, root: small_graph())
    out = tmp_path / "follow.json"
    flags = ["--model", "gat", "--bits", "2", "--epochs", "3", "--out", str(out)]
    assert main(flags) == 0
    text = capsys.readouterr().out
    content = json.loads(out.read_text())
    stock, compressed = content["fp32_loss"], content["compressed_loss"]
    assert (content["level"], len(stock), len(compressed)) == ("L1", 3, 3)
    assert content["relative_difference"] == relative_differences(stock, compressed)
    assert "L1 2 bit loss" in text
    assert f"largest relative difference: {max(content['relative_difference']):.2e}" in text
    assert f"{stock[2]:.6f}" in text and f"{compressed[2]:.6f}" in text


def test_relative_differences() -> None:
    assert relative_differences([2.0, 4.0, 0.0, 0.0], [2.5, 3.0, 0.0, 1.0]) == [
        0.25,
        0.25,
        0.0,
        math.inf,
    ]
    assert largest([0.5, 2.0, 1.0]) == 2.0
    assert math.isnan(largest([0.5, math.nan, 1.0]))


@pytest.mark.parametrize(
    ("line", "code", "words"),
    [
        ("--model gin", 2, "gin"),
        ("--level L3", 2, "L3"),
        ("--epochs 0", 2, "Expected a whole number of at least 1"),
        ("--dataset nosuch", 1, "nosuch"),
    ],
)
def test_mistakes_end_in_one_line(line: str, code: int, words: str, capsys) -> None:
    assert main(line.split()) == code
    text = capsys.readouterr().err
    assert text.startswith("follow: ") and words in text
    assert text.count("\n") == 1
