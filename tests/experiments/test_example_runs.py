"""Memory and time of the examples, beside stock PyG."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import fresh
import pytest

from experiments.examples import by_example, main


def measured(peak: int, seconds: float) -> dict[str, Any]:
    return {"nodes": 5, "edges": 2000, "peak_bytes": peak * 10**6, "step_seconds": seconds}


def test_a_row_has_the_medians_of_all_rounds() -> None:
    stock = [measured(90, 3.0), measured(30, 1.0), measured(20, 2.0)]
    ours = [measured(2, 0.25), measured(1, 0.5), measured(3, 0.75)]
    runs = {"stock PyG": stock, "gact_graph": ours}
    [row] = by_example({"examples": {"hetero": runs}}).rows
    assert row == ("`hetero.py`", "5", "2,000", "30 MB", "2 MB", "2.00", "0.50")


def test_a_row_without_numbers_shows_the_reason() -> None:
    runs = {"stock PyG": [{"reason": "PyG needs a sampler"}], "gact_graph": [measured(1, 1)]}
    [row] = by_example({"examples": {"shadow": runs}}).rows
    assert row[:2] == ("`shadow.py`", "PyG needs a sampler")
    [row] = by_example({"examples": {"shadow": {"stock PyG": []}}}).rows  # every run failed
    assert row[:2] == ("`shadow.py`", "failed")


def test_end_to_end(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "examples.json"
    flags = ["--examples", "full_batch_gat", "--nodes", "1000", "--steps", "1", "--rounds", "1"]
    assert main([*flags, "--out", str(out)]) == 0
    runs = json.loads(out.read_text())["examples"]["full_batch_gat"]
    ([stock], [ours]) = runs.values()
    assert stock["nodes"] == ours["nodes"] > 500
    assert stock["edges"] == ours["edges"] > 5000
    # Stock PyG has messages of 512 channels for each edge.
    assert stock["peak_bytes"] > stock["edges"] * 512 * 4 > 0
    assert ours["peak_bytes"] < stock["peak_bytes"]
    assert ours["step_seconds"] > 0 < stock["step_seconds"]
    assert "full_batch_gat.py" in capsys.readouterr().out


def test_an_example_without_its_packages_gives_the_reason() -> None:
    printed = fresh.run("""
import torch_geometric.typing as there
from experiments.helpers.examples import measure
there.WITH_PYG_LIB = there.WITH_TORCH_SPARSE = False
print(measure("neighbor_loader", True, 1, 100))
""")
    assert "{'reason': 'PyG samples neighbors with pyg-lib or torch-sparse" in printed
