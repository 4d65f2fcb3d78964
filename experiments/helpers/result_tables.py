"""Each table of the pages, as Markdown, made from one or two files in results/.

Every table ends in a line that names the command, the versions and the machine behind it.
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
from experiments.helpers.strategies import STRATEGIES as WAYS
from experiments.helpers.table_sources import read, source, sources

_SUBJECTS = {
    "gat": "GAT, arxiv_graph",
    "gcn-edge_index": "GCN on `edge_index`, arxiv_graph",
    "gatv2": "GATv2, flickr_graph",
    "transformer": "TransformerConv, flickr_graph",
}

_HEADLINE_PEERS = {
    "stock-kept": "stock PyG with gact_graph's memory allocation",
    "checkpoint": WAYS["checkpoint"].label,
    "dgl": WAYS["dgl"].label,
    "lossless+blocks": '**gact_graph**, `level="lossless", blocks="auto"`',
}
"""What computes the same as stock, and what the first table calls it."""


_LEVELS = (
    *("stock", "checkpoint", "lossless", "lossless+blocks"),
    *("L1-4+blocks", "L1-2+blocks", "CB2"),
)


def tables(results: Path) -> dict[str, Callable[[], str]]:
    """Return what makes each table, by name."""
    found: dict[str, Callable[[], str]] = {}
    makers: tuple[tuple[str, Callable[[Path], str]], ...] = (
        ("headline", _headline),
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
    memory = read(results / "peers" / "gat.json")
    study = score_tables.studies(results)["arxiv_graph-gat"]
    variants = memory["variants"]
    stock = variants["stock"]

    def score(variant: str) -> str:
        return summary.percent([run["test_score"] for run in study["runs"][variant]])

    def row(label: str, variant: str, accuracy: str) -> tuple[str, ...]:
        peak, _, time, _ = _cost(variants[variant], stock)
        return (label, peak, time, accuracy)

    peers = [row(said, variant, "as stock") for variant, said in _HEADLINE_PEERS.items()]
    table = markdown_table(
        ("", "peak memory", "time a step", "test accuracy, %"),
        [
            row("stock PyG", "stock", score("fp32")),
            *peers,
            row("**gact_graph**, `bits=4`", "L1-4+blocks", score("adaptive-4")),
        ],
    )
    runs = len(study["runs"]["fp32"])
    return "\n\n".join(
        (
            table,
            source(memory, "Peak and time"),
            source(
                study,
                f"Accuracy of {'one run' if runs == 1 else f'{runs} runs'} of "
                f"{study['config']['epochs']} epochs",
            ),
        )
    )


def _levels(results: Path) -> str:
    found = read(results / "peers" / "gat.json")
    variants = found["variants"]
    stock = variants["stock"]
    rows = [
        (WAYS[name].label, *_cost(variants[name], stock), _megabytes(variants[name]["saved_bytes"]))
        for name in _LEVELS
    ]
    head = ("", "peak", "less than stock", "s/step", "of stock's", "held for backward")
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
        rows.append((_SUBJECTS[model], *cells))
    head = ("", "stock", "`lossless`", "`L1`, 4 bit")
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
    head = ("", "nodes", "edges", "of stock's", "s/step", "edges a second, of stock's")
    return f"{markdown_table(head, rows)}\n\n{source(found)}"


def _table3(found: Mapping[str, Any]) -> str:
    return markdown_table(table3.head(found["rows"]), table3.rows(found["rows"]))


def _cost(variant: Mapping[str, Any], stock: Mapping[str, Any]) -> tuple[str, str, str, str]:
    """Peak, how many times less than stock's, seconds a step, and their ratio to stock's."""
    return (
        _megabytes(variant["peak_bytes"]),
        f"{stock['peak_bytes'] / variant['peak_bytes']:.1f}x",
        f"{variant['step_seconds']:.1f} s",
        f"{variant['step_seconds'] / stock['step_seconds']:.2f}x",
    )


def _megabytes(size: int) -> str:
    return f"{size / 1e6:,.0f} MB"
