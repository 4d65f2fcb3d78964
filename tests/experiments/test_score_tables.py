"""The tables of scores, from studies made up for them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from experiments.helpers import result_tables
from experiments.helpers.paper import VARIANTS


def study(graph: str, model: str, below: dict[str, float], seeds: int = 3) -> dict[str, Any]:
    """Runs that score 0.8, and less by what is given; with a rate of their bits' inverse."""
    runs = {
        variant.name: [
            {
                "seed": seed,
                "test_score": 0.8 + 0.01 * seed - below.get(variant.name, 0.0),
                "rate": 32 / variant.bits,
            }
            for seed in range(seeds)
        ]
        for variant in VARIANTS
    }
    versions = {"gact_graph": "0.7.0", "torch": "2.13.0+cpu", "torch_geometric": "2.8.1"}
    head = {"graph": graph, "model": model, "command": "python -m x", "machine": "2 cores"}
    head |= {"commit": "1111111"}
    return head | {"versions": versions, "config": {"threads": 1}, "runs": runs}


def write(folder: Path, *studies: dict[str, Any]) -> Path:
    """Each in a file of its own, as several commands leave them."""
    (folder / "table2").mkdir()
    for one in studies:
        name = f"{one['graph']}-{one['model']}"
        (folder / "table2" / f"{name}.json").write_text(json.dumps({name: one}))
    return folder


def test_scores_tell_differences_to_fp32_and_the_furthest(tmp_path: Path) -> None:
    results = write(
        tmp_path,
        study("cora", "gat", {"adaptive-2": 0.05, "fixed-4": -0.01}, seeds=2),
        study("cora", "gcn", {"adaptive-2": 0.02}),
        study("amazon", "gcnii", {"adaptive-2": 0.09}, seeds=1),
    )
    text = result_tables.tables(results)["scores"]()
    assert "| cora | GCN | 3 | 81.00 ± 1.00 | -0.00 ± 0.00 |" in text.replace("+0.00", "-0.00")
    assert "| -2.00 ± 0.00 |" in text
    assert "| amazon | GCNII | 1 | 80.00 | +0.00 |" in text  # one seed has no interval
    assert text.index("| amazon | GCNII |") < text.index("| cora | GCN |")
    assert text.index("| cora | GCN |") < text.index("| cora | GAT |")
    assert "5.00 points with adaptive 2 bit (GAT on cora)" in text
    assert "0.00 points with fixed 4 bit (GCN on cora)" in text
    assert text.count("python -m x") == 1


def test_rates_range_over_graphs(tmp_path: Path) -> None:
    few = study("cora", "gcn", {})
    for run in few["runs"]["adaptive-4"]:
        run["rate"] = 20.0
    models = [study("cora", model, {}) for model in ("gat", "gcnii")]
    results = write(tmp_path, few, study("citeseer", "gcn", {}), *models)
    text = result_tables.tables(results)["rates"]()
    assert "| GCN | 8.0 to 8.0x | 8.0 to 20.0x | 10.7 to 10.7x | 16.0 to 16.0x |" in text
