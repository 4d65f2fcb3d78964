"""Images and texts with compressed contexts: the data, and a training of a few steps."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch
from torch import Tensor, nn

from experiments import generality
from experiments.generality import by_width, train
from experiments.models.general import FIELDS, excerpts, score_of

_HERE = ("resnet", "bert", "vit")
"""What needs no torchvision."""


@pytest.fixture(autouse=True)
def _no_torchvision(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torchvision", None)


def test_excerpts_are_text_of_their_topics() -> None:
    words, topics = excerpts()
    assert words.shape == (len(topics), 32)
    assert topics.unique().tolist() == [*range(8)]
    assert (words == 0).double().mean() < 0.2  # rare words
    shares = words[words > 0].bincount().double() / words.numel()
    assert shares[1] == shares.max() > 0.02  # the most common word, of all


@pytest.mark.parametrize("name", _HERE)
def test_batches_do_not_reach_into_what_is_held_out(name: str) -> None:
    one, other = FIELDS[name](), FIELDS[name]()
    assert all(torch.equal(a, b) for a, b in zip(one.held_out, other.held_out, strict=True))
    seen, _ = one.batch(5000, torch.Generator().manual_seed(0))
    held = {tuple(example.flatten().tolist()) for example in one.held_out[0]}
    both = held & {tuple(example.flatten().tolist()) for example in seen}
    assert len(held) > 100 and len(both) <= len(held) // 50  # some are there twice


class _Knows(nn.Module):
    """Answers the input's own number."""

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.one_hot(x, 5).float()


def test_the_score_counts_what_is_right() -> None:
    assert score_of(_Knows(), (torch.tensor([0, 1, 2, 3]), torch.tensor([0, 1, 4, 3]))) == 0.75


@pytest.mark.parametrize("name", _HERE)
def test_compressed_training_starts_from_the_same_loss(name: str) -> None:
    exact, compressed = (train(name, bits, 0, steps=1, batch=4) for bits in (32, 4))
    assert exact["loss"] == pytest.approx(compressed["loss"], rel=1e-5)
    assert compressed["rate"] > 2 and exact["rate"] == 1


@pytest.mark.usefixtures("forked")
def test_end_to_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = ["--model", "resnet", "--steps", "3", "--batch", "8", "--bits", "32,4"]
    flags += ["--out", str(tmp_path)]
    assert generality.main([*flags, "--seeds", "0"]) == 0
    assert generality.main([*flags, "--seeds", "0,1"]) == 0
    runs = json.loads((tmp_path / "resnet.json").read_text())["runs"]
    assert [(run["bits"], run["seed"]) for run in runs] == [(32, 0), (4, 0), (32, 1), (4, 1)]
    assert [row[:2] for row in by_width(runs).rows] == [("fp32", "2"), ("4 bit", "2")]
    assert " ± " in by_width(runs).rows[1][3]
    monkeypatch.setattr(generality, "call", lambda *_: pytest.fail("trained"))
    assert generality.main([*flags, "--seeds", "0,1"]) == 0
    assert "4 bit" in capsys.readouterr().out
    assert by_width(runs).rows[1][-1].endswith("x")
    assert generality.main([*flags, "--batch", "9"]) == 1
    assert "batch 8 instead of 9" in capsys.readouterr().err


def test_bad_widths_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert generality.main(["--model", "bert", "--bits", "4,x", "--out", str(tmp_path)]) == 2
    assert "argument --bits: Expected a whole number" in capsys.readouterr().err


def test_resnets_are_torchvisions_where_it_imports(monkeypatch: pytest.MonkeyPatch) -> None:
    assert FIELDS["resnet"]().network == "resnet"
    stand_in = ModuleType("torchvision")
    stand_in.models = ModuleType("torchvision.models")  # type: ignore[attr-defined]
    made: list[int] = []

    def resnet18(num_classes: int) -> nn.Module:
        made.append(num_classes)
        return nn.Sequential(nn.Flatten(), nn.Linear(3 * 32 * 32, num_classes))

    stand_in.models.resnet18 = resnet18  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "torchvision", stand_in)
    field = FIELDS["resnet"]()
    assert field.network == "resnet18"
    inputs, _ = field.batch(4, torch.Generator().manual_seed(0))
    assert inputs.shape == (4, 3, 32, 32) and inputs.min() >= 0 and inputs.max() <= 1
    assert field.make()(inputs).shape == (4, 10) and made == [10]


def test_a_resnet_asked_for_by_name_needs_torchvision(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert generality.main(["--model", "resnet50", "--out", str(tmp_path / "out")]) == 2
    assert "Expected torchvision for resnet50" in capsys.readouterr().err
