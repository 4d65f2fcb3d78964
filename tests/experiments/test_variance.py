"""The variance and the bias of compressed gradients, with few draws."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from experiments.variance import main
from gact_graph.codecs import registered

GRAPH = ("--dataset", "synthetic:ogbn-arxiv@0.003")


def measure(out: Path, *flags: str) -> dict[str, Any]:
    assert main([*GRAPH, "--out", str(out), *flags]) == 0
    (file,) = out.glob("*.json")
    return json.loads(file.read_text())


def test_each_slot_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = measure(tmp_path, "--hidden", "8", "--layers", "2", "--draws", "6", "--bits", "6")
    slots, (together,) = found["singles"][0]["slots"], found["rows"]
    assert len(slots) == 4
    for slot in slots:
        assert slot["predicted"] == pytest.approx(slot["true"], rel=0.8), slot
        assert slot["bias"] ** 2 <= slot["true"]
    limit = 10 * together["bias_squared_error"] + together["variance"]
    assert abs(together["bias_squared"]) < limit
    assert together["variance"] == pytest.approx(sum(slot["true"] for slot in slots), rel=0.5)
    said = capsys.readouterr().out
    assert "all slots together" in said and "sum of the variances" in said


@pytest.mark.long
def test_models_and_norms(tmp_path: Path) -> None:
    model = ("--model", "pyg-gcn", "--norm", "BatchNorm", "--act", "elu")
    found = measure(tmp_path, *model, "--draws", "4")
    slots = {slot["slot"] for slot in found["singles"][0]["slots"]}
    assert {"norms.0/module/batch_norm.input", "act/elu.derivative"} <= slots


def test_the_total_for_widths_norms_and_activations(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = ("--model", "pyg-gcn", "--norm", "none,LayerNorm", "--act", "relu,elu")
    found = measure(tmp_path, "--total", *model, "--draws", "4", "--bits", "2,8")
    assert "singles" not in found and [path.name for path in tmp_path.iterdir()] == [
        "variance.json"
    ]
    rows = found["rows"]
    kinds = [(row["norm"], row["act"], row["bits"]) for row in rows]
    each = [(norm, act) for norm in (None, "LayerNorm") for act in ("relu", "elu")]
    assert kinds == [(*kind, bits) for kind in each for bits in (2, 8)]
    for two, eight in zip(rows[::2], rows[1::2], strict=True):
        assert 0 < eight["variance"] < 0.01 * two["variance"]
        assert two["saved_bytes"] < eight["saved_bytes"]
    said = capsys.readouterr().out
    assert "saved, MB" in said and "LayerNorm" in said and "(below" in said


def test_peers_after_some_training(tmp_path: Path) -> None:
    before = registered()
    flags = ("--total", "--model", "gcn", "--hidden", "16", "--draws", "4", "--epochs", "3")
    variants = ("--variants", "L1,exact,exact-wide,mesa,gact", "--bits", "2,4")
    rows = {(r["variant"], r["bits"]): r for r in measure(tmp_path, *flags, *variants)["rows"]}
    peers = [("exact", 2), ("exact-wide", 2), ("mesa", 8), ("gact", 2), ("gact", 4)]
    assert [*rows] == [("L1", 2), ("L1", 4), *peers]
    assert rows["exact-wide", 2]["variance"] < 0.1 * rows["exact", 2]["variance"]
    assert rows["exact", 2]["saved_bytes"] < rows["exact-wide", 2]["saved_bytes"]
    assert rows["gact", 4]["variance"] < rows["gact", 2]["variance"]
    assert registered() == before


def test_training_comes_first(tmp_path: Path) -> None:
    flags = ("--total", "--model", "gcn", "--hidden", "16", "--draws", "4")
    rows = [
        measure(tmp_path / epochs, *flags, *options)["rows"][0]
        for epochs, options in {"none": (), "some": ("--epochs", "20")}.items()
    ]
    assert rows[0]["saved_bytes"] == rows[1]["saved_bytes"]
    assert rows[1]["variance"] > 1.5 * rows[0]["variance"]


def test_after_training_with_adaptive_bits(tmp_path: Path) -> None:
    flags = ("--total", "--adaptive", "--model", "gcn", "--hidden", "16", "--draws", "4")
    found = measure(tmp_path, *flags, "--epochs", "5", "--bits", "2,8")["rows"]
    assert [row["bits"] for row in found] == [2, 8]
    assert 0 < found[1]["variance"] < 0.1 * found[0]["variance"]
    assert found[0]["saved_bytes"] < found[1]["saved_bytes"]
    before = registered()
    [row] = measure(tmp_path / "peer", *flags, "--epochs", "2", "--variants", "gact")["rows"]
    assert row["variance"] > 0 and registered() == before


@pytest.mark.long
def test_averages(tmp_path: Path) -> None:
    found = measure(tmp_path, "--averaged", "3", "--hidden", "8", "--layers", "2", "--bits", "2,4")
    assert [row["bits"] for row in found["rows"]] == [2, 4]
    assert all(row["fresh"] > 0 and row["dithered"] > 0 for row in found["rows"])


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("--norm", "BatchNorm"), "Expected --norm, --act and --dropout with pyg-gcn"),
        (("--adaptive", "--averaged", "3"), "Expected --total with --adaptive (got no --total)"),
        (("--variants", "L1,exact"), "Expected --variants with --total (got L1, exact)"),
    ],
)
def test_flags_that_do_not_fit(
    flags: tuple[str, ...], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*GRAPH, "--out", str(tmp_path), *flags]) == 2
    assert message in capsys.readouterr().err
