"""Images and texts with compressed contexts: the data, and a training of a few steps."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from experiments import generality
from experiments.generality import rows, train
from experiments.models.general import (
    FIELDS,
    Field,
    documentation,
    images,
    masked,
    score_of,
    texts,
)


class TestTexts:
    def test_documentation_is_text(self) -> None:
        characters = documentation()
        assert len(characters) > 100_000
        assert characters.min() >= 0 and characters.max() <= 95
        letters = "".join(chr(32 + c) for c in characters.tolist() if c < 95)
        assert "statement" in letters

    def test_what_is_asked_for_is_hidden_and_the_rest_is_not(self) -> None:
        text = torch.randint(95, (64, 100))
        inputs, targets = masked(text, torch.Generator().manual_seed(0))
        asked = targets != -100
        assert asked.double().mean() == pytest.approx(0.15, abs=0.02)
        assert torch.equal(targets[asked], text[asked])
        assert (inputs[asked] == 96).all() and torch.equal(inputs[~asked], text[~asked])

    def test_batches_do_not_reach_into_what_is_held_out(self) -> None:
        field = texts(length=32)
        inputs, targets = field.batch(4, torch.Generator().manual_seed(0))
        assert inputs.shape == targets.shape == (4, 32)
        assert field.held_out[0].shape[1] == 32


def test_images_are_split_once() -> None:
    one, other = images(), images()
    assert torch.equal(one.held_out[1], other.held_out[1])
    assert one.held_out[0].shape == (180, 1, 8, 8)


class _Knows(nn.Module):
    """Answers the input's own number."""

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.one_hot(x, 5).float().transpose(1, -1)


def test_the_score_counts_what_was_asked_for() -> None:
    inputs = torch.tensor([[0, 1, 2], [3, 4, 0]])
    targets = torch.tensor([[0, -100, 1], [3, -100, 0]])
    assert score_of(_Knows(), (inputs, targets)) == 0.75


@pytest.mark.parametrize("name", [*FIELDS])
def test_compressed_training_starts_from_the_same_loss(name: str) -> None:
    field = FIELDS[name]()
    small = Field(field.make, field.batch, tuple(t[:8] for t in field.held_out), field.lr)
    exact, compressed = (train(small, bits, 0, steps=1, batch=4) for bits in (32, 4))
    assert exact["loss"] == pytest.approx(compressed["loss"], rel=1e-5)
    assert compressed["rate"] > 2 and exact["rate"] == 1


def test_end_to_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = ["--model", "resnet", "--steps", "3", "--batch", "8", "--bits", "32,4"]
    flags += ["--out", str(tmp_path)]
    assert generality.main([*flags, "--seeds", "0"]) == 0
    assert generality.main([*flags, "--seeds", "0,1"]) == 0
    runs = json.loads((tmp_path / "resnet.json").read_text())["runs"]
    assert [(run["bits"], run["seed"]) for run in runs] == [(32, 0), (4, 0), (32, 1), (4, 1)]
    assert [row[:2] for row in rows(runs)] == [("fp32", "2"), ("4 bit", "2")]
    assert " ± " in rows(runs)[1][3]
    monkeypatch.setattr(generality, "train", lambda *_: pytest.fail("trained"))
    assert generality.main([*flags, "--seeds", "0,1"]) == 0
    assert "4 bit" in capsys.readouterr().out
    untimed = [{k: v for k, v in run.items() if k != "step_process_seconds"} for run in runs]
    assert rows(runs)[1][-1].endswith("x") and rows(untimed)[1][-1] == ""
    assert generality.main([*flags, "--batch", "9"]) == 1
    assert "another batch" in capsys.readouterr().err


def test_bad_widths_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert generality.main(["--model", "bert", "--bits", "4,x", "--out", str(tmp_path)]) == 2
    assert "argument --bits: Expected a whole number" in capsys.readouterr().err
