"""The study of sensitivities, on a small graph."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from datasets import load
from experiments.helpers.data import prepare
from experiments.helpers.levels import LEVELS_BY_NAME
from experiments.helpers.noise import Probe
from experiments.helpers.subjects import SUBJECTS, make
from experiments.sensitivity import least_variance, main
from gact_graph.adaptive.allocator import allocate, noise, variance


def test_no_allocation_is_below_the_least_variance() -> None:
    sensitivities, sizes = [8.0, 0.5, 3.0], [100, 400, 50]
    for bits in (2.0, 4.0, 5.5):
        least = least_variance(sensitivities, sizes, bits)
        found = allocate(sensitivities, sizes, bits * sum(sizes))
        assert 0.2 * variance(sensitivities, found) < least < variance(sensitivities, found)
    # Where all elements are alike there is nothing to gain.
    assert least_variance([1.0, 4.0], [10, 40], 8) == pytest.approx(5 * 4.0**-8)


def test_a_probe_tells_noise_from_none() -> None:
    subject = SUBJECTS["gcn"]
    task = prepare(
        load("synthetic:ogbn-arxiv@0.003", "data"), subject.layout, device=torch.device("cpu")
    )
    exact = Probe(LEVELS_BY_NAME["lossless"].wrap(make(subject, task)), task)
    noisy = Probe(LEVELS_BY_NAME["L1"].wrap(make(subject, task)), task)
    assert torch.equal(exact.gradient(0), exact.gradient(1))
    assert not torch.equal(noisy.gradient(0), noisy.gradient(1))
    assert torch.equal(noisy.gradient(1), noisy.gradient(1))
    assert set(noisy.sensitivities()) == {r.slot for r in noisy.report.contexts if r.bits}


def test_end_to_end(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["--model", "gcn", "--dataset", "synthetic:ogbn-arxiv@0.003", "--epochs", "4"]
    flags += ["--points", "2", "--draws", "4"]
    assert main([*flags, "--out", str(tmp_path)]) == 0
    found = json.loads((tmp_path / "sensitivity.json").read_text())
    assert [point["epoch"] for point in found["evolution"]] == [1, 2, 4]
    schemes = [v["scheme"] for v in found["variance"]]
    assert schemes == ["adaptive 4 bit", "uniform 4 bit", "uniform 8 bit"]
    variances = [v["variance"] for v in found["variance"]]
    assert variances[2] < variances[1]
    sizes = [v["quantized_bytes"] for v in found["variance"]]
    assert sizes[0] <= sizes[1] * 1.001 < sizes[2]
    assert (
        0
        < found["least_variance"]
        < sum(slot["sensitivity"] * noise(slot["bits"]) for slot in found["slots"])
    )
    assert all(slot["sensitivity"] > 0 for slot in found["slots"])
    for name in ("sensitivities", "evolution"):
        assert (tmp_path / f"{name}.png").stat().st_size > 5000
    assert "The noise of compression" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--bits", "9"], "Expected --bits whose double is a width too, 1 to 8 or 16"),
        (["--bits", "32"], "Expected --bits whose double is a width too, 1 to 8 or 16"),
        (["--draws", "1"], "--draws: Expected at least 3 draws (got '1')"),
    ],
)
def test_flags_that_cannot_be_used(
    flags: list[str], words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*flags, "--out", str(tmp_path)]) == 2
    assert words in capsys.readouterr().err
