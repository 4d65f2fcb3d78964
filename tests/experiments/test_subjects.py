from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from experiments_samples import small_graph

import gact_graph
from datasets import DatasetError
from experiments.helpers.data import prepare
from experiments.helpers.errors import UsageError
from experiments.helpers.subjects import (
    SUBJECTS,
    choose,
    exit_code,
    label,
    make,
    wrap_at,
    write_json,
)


def test_models_are_those_of_the_design() -> None:
    gcn, gat, gcnii = (SUBJECTS[name].make(128, 40) for name in ("gcn", "gat", "gcnii"))
    assert [conv.out_channels for conv in gcn.convs] == [256, 256, 40]
    assert [(conv.heads, conv.out_channels) for conv in gat.convs] == [(3, 64), (3, 64), (3, 40)]
    assert [conv.channels for conv in gcnii.convs] == [256] * 16
    assert SUBJECTS["gcn-edge_index"].make(128, 40).convs[0].normalize


@pytest.mark.parametrize("name", SUBJECTS)
def test_every_make_gives_the_same_weights_and_the_same_dropout(name: str) -> None:
    subject = SUBJECTS[name]
    task = prepare(small_graph(), subject.layout)
    first, second = (make(subject, task)(task.x, task.adjacency) for _ in range(2))
    assert torch.equal(first, second)
    assert first.shape == (60, 3)


@pytest.mark.parametrize("level", ["L0", "lossless", "L1"])
def test_bits_are_for_levels_that_quantize(level: str) -> None:
    task = prepare(small_graph(), "csr")
    model = wrap_at(make(SUBJECTS["gcn"], task), level, 4)
    model(task.x, task.adjacency)
    widths = {row.bits for row in gact_graph.report(model).contexts}
    assert (4 in widths) == (level == "L1")


def test_label() -> None:
    assert [label(level, 2) for level in ("L0", "lossless", "L1")] == ["L0", "lossless", "L1 2 bit"]


def test_names_count_once_and_must_be_known() -> None:
    assert choose("--models", "b,a,b", ("a", "b")) == ["b", "a"]
    with pytest.raises(UsageError, match=r"Expected --models of a, b \(got ''\)"):
        choose("--models", "a,", ("a", "b"))


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (UsageError("words"), 2),
        (DatasetError("words"), 1),
        (torch.OutOfMemoryError("words"), 1),
    ],
)
def test_errors_end_in_one_line(error: Exception, code: int, capsys) -> None:
    def fail() -> None:
        raise error

    assert exit_code("tool", fail) == code
    text = capsys.readouterr().err
    assert text.startswith("tool: ") and text.count("\n") == 1
    assert exit_code("tool", lambda: None) == 0


def test_json_is_written(tmp_path: Path) -> None:
    write_json(tmp_path / "a.json", {"key": [1, 2.5]})
    assert json.loads((tmp_path / "a.json").read_text()) == {"key": [1, 2.5]}
