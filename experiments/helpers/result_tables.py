"""Each table of the pages, as Markdown, made from one or two files in results/.

Every table ends in a caption that names the command, the commit, the versions and the machine.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from experiments.helpers import (
    estimate_tables,
    forces_tables,
    gradient_tables,
    peer_tables,
    score_tables,
    summary,
    table3,
    time_tables,
)
from experiments.helpers.labels import LABELS
from experiments.helpers.markdown import markdown_table
from experiments.helpers.parts import tables as parts_tables
from experiments.helpers.strategies import STRATEGIES
from experiments.helpers.table_sources import read, source, sources

_SUBJECTS = {
    "gat": "GAT, arxiv_graph",
    "gcn-edge_index": "GCN on `edge_index`, arxiv_graph",
    "gatv2": "GATv2, flickr_graph",
    "transformer": "TransformerConv, flickr_graph",
}

_NETWORKS = {
    "gat": "GAT, arxiv_graph",
    "gcn": "GCN on `edge_index`, arxiv_graph",
    "gatv2": "GATv2, flickr_graph",
    "transformer": "TransformerConv, flickr_graph",
    "gcnii": "GCNII on a sparse matrix, arxiv_graph",
}

_COMPARED = ("stock", "stock-kept", "dgl", "lossless+blocks", "L1-4+blocks")

_HEADLINE_PEERS = {
    "stock-kept": "stock PyG with gact_graph's memory allocation",
    "checkpoint": STRATEGIES["checkpoint"].label,
    "dgl": STRATEGIES["dgl"].label,
    "lossless+blocks": '**gact_graph**, `level="lossless", blocks="auto"`',
}
"""The ways that compute the same as stock, with their names in the first table."""

_LEVELS = (
    *("stock", "checkpoint", "lossless", "lossless+blocks"),
    *("L1-4+blocks", "L1-2+blocks", "CB2"),
)


def tables(results: Path) -> dict[str, Callable[[], str]]:
    """Return a function for each table, by name."""
    found: dict[str, Callable[[], str]] = {}
    makers: tuple[tuple[str, Callable[[Path], str]], ...] = (
        ("headline", _headline),
        ("headline-accuracy", _headline_accuracy),
        ("networks", _networks),
        ("levels", _levels),
        ("overhead", time_tables.overhead),
        ("overhead-of-default", time_tables.overhead_of_default),
        ("busy", time_tables.busy),
        ("allocators", time_tables.allocators),
        ("saved", _saved),
        ("largest-graph", _largest_graph),
        ("scores", score_tables.scores),
        ("rates", score_tables.rates),
        ("gcnii-amazon", functools.partial(score_tables.trainings, file="gcnii_amazon.json")),
        ("low-bits", functools.partial(score_tables.trainings, file="low_bits.json")),
        ("gradient-variance", gradient_tables.gradient_variance),
        ("allocation", gradient_tables.allocation),
        ("gradient-error", gradient_tables.gradient_error),
        ("bias", gradient_tables.bias),
        ("agreement", gradient_tables.agreement),
        ("forces", forces_tables.forces),
        ("forces-physics", forces_tables.forces_physics),
    )
    found |= {name: functools.partial(make, results) for name, make in makers}
    estimates = results / "estimates.json"
    if estimates.exists():
        shown = {"estimates": estimate_tables.predictions, "budgets": estimate_tables.budgets}
        found |= {n: functools.partial(_with_source, estimates, show) for n, show in shown.items()}
    kinds = (
        ("peers", peer_tables.peers),
        ("generality", peer_tables.generality),
        ("partition", parts_tables.partition),
        ("table3", _table3),
    )
    for kind, make in kinds:
        for name in peer_tables.names(results, kind):
            path = results / kind / f"{name}.json"
            found[f"{kind}-{name}"] = functools.partial(_with_source, path, make)
    return found | {
        "paper-scores": score_tables.paper_scores,
        "paper-rates": score_tables.paper_rate_ranges,
    }


def _with_source(path: Path, make: Callable[[Any], str]) -> str:
    found = read(path)
    return f"{make(found)}\n\n{source(found)}"


def _headline(results: Path) -> str:
    found = read(results / "peers" / "gat.json")
    variants = found["variants"]
    ways = {"stock": "stock PyG", **_HEADLINE_PEERS, "L1-4+blocks": "**gact_graph**, `bits=4`"}
    rows = []
    for way, label in ways.items():
        peak, _, time, _ = _cost(variants[way], variants["stock"])
        rows.append((label, peak, time))
    return f"{markdown_table(('', 'peak memory', 'time per step'), rows)}\n\n{source(found)}"


def _headline_accuracy(results: Path) -> str:
    study = score_tables.studies(results)["arxiv_graph-gat"]
    stock, compressed = (
        summary.percent([run["test_score"] for run in study["runs"][variant]])
        for variant in ("fp32", "adaptive-4")
    )
    runs = len(study["runs"]["fp32"])
    said = (
        f"Test accuracy after {study['config']['epochs']} epochs, "
        f"{'one run' if runs == 1 else f'{runs} runs'} each: {stock} % with stock PyG, "
        f"{compressed} % with gact_graph's `bits=4`."
    )
    return f"{said}\n\n{source(study)}"


def _networks(results: Path) -> str:
    files = {model: read(results / "peers" / f"{model}.json") for model in _NETWORKS}
    rows = []
    for model, found in files.items():
        costs = (_cost(found["variants"][way], found["variants"]["stock"]) for way in _COMPARED)
        cells = (f"{peak}, {time}" for peak, _, time, _ in costs)
        rows.append((_NETWORKS[model], *cells, found["commit"]))
    head = ("", *(STRATEGIES[way].label for way in _COMPARED), "commit")
    return f"{markdown_table(head, rows)}\n\n{sources(files.values())}"


def _levels(results: Path) -> str:
    found = read(results / "peers" / "gat.json")
    variants = found["variants"]
    stock = variants["stock"]
    rows = [
        (
            STRATEGIES[name].label,
            *_cost(variants[name], stock),
            _megabytes(variants[name]["saved_bytes"]),
        )
        for name in _LEVELS
    ]
    head = ("", "peak", "reduction", "s/step", "relative to stock", "saved for backward")
    return f"{markdown_table(head, rows)}\n\n{source(found)}"


def _saved(results: Path) -> str:
    files = {model: read(results / "memory" / f"{model}.json") for model in _SUBJECTS}
    rows = []
    for model, found in files.items():
        cells = [_megabytes(found["variants"]["lossless"]["raw_bytes"])]
        for name in ("lossless", "L1"):
            variant = found["variants"][name]
            times = variant["raw_bytes"] / variant["saved_bytes"]
            cells.append(f"{_megabytes(variant['saved_bytes'])} ({times:.1f}x less)")
        rows.append((_SUBJECTS[model], *cells, found["commit"]))
    head = ("", "stock", "`lossless`", "`L1`, 4 bit", "commit")
    return f"{markdown_table(head, rows)}\n\n{sources(files.values())}"


def _largest_graph(results: Path) -> str:
    found = read(results / "scaling" / "gat-graph.json")
    largest = found["largest"]["graph"]
    stock = largest["stock"]
    speed = stock["edges"] / stock["step_seconds"]
    rows = []
    for name in (name for name in LABELS if name in largest):
        row = largest[name]
        rows.append(
            (
                LABELS[name],
                f"{row['nodes']:,}",
                f"{row['edges']:,}",
                f"{row['edges'] / stock['edges']:.1f}x",
                f"{row['step_seconds']:.1f}",
                f"{row['edges'] / row['step_seconds'] / speed:.2f}x",
            )
        )
    head = ("", "nodes", "edges", "relative", "s/step", "edges per second, relative")
    return f"{markdown_table(head, rows)}\n\n{source(found)}"


def _table3(found: Mapping[str, Any]) -> str:
    return markdown_table(table3.head(found["rows"]), table3.rows(found["rows"]))


def _cost(variant: Mapping[str, Any], stock: Mapping[str, Any]) -> tuple[str, str, str, str]:
    """Return peak, its reduction, seconds per step, and their ratio to stock PyG."""
    return (
        _megabytes(variant["peak_bytes"]),
        f"{stock['peak_bytes'] / variant['peak_bytes']:.1f}x",
        f"{variant['step_seconds']:.1f} s",
        f"{variant['step_seconds'] / stock['step_seconds']:.2f}x",
    )


def _megabytes(size: int) -> str:
    return f"{size / 1e6:,.0f} MB"
