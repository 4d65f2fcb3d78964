"""Saved bytes against the error of the gradient: codes of the library, and of peers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import PurePath
from typing import Any

from experiments.helpers.gradients import bias_of
from experiments.helpers.strategies import STRATEGIES
from experiments.helpers.tables import Column, Table, table

NAMES = {"exact": "EXACT, projected", "exact-wide": "EXACT", "mesa": "Mesa", "gact": "GACT"}
"""Variants of ``experiments.variance``, and their names in tables and pictures."""

_LARGE = 10.0
"""A variance with which nothing trains."""

_NETWORKS = {
    "gcn": "GCN, 3 layers of 64",
    "gat": "GAT, 3 layers of 3 heads of 32",
}


def title_of(content: Mapping[str, Any]) -> str:
    """Return the names of the network and of the graph."""
    return f"{_NETWORKS[content['model']]}, {PurePath(content['dataset']).stem}"


def rows_of(content: Mapping[str, Any]) -> dict[int, Mapping[str, Any]]:
    """Return the rows of the library itself, by bits."""
    rows = (row for row in content["rows"] if STRATEGIES[row["variant"]].ours)
    return {row["bits"]: row for row in sorted(rows, key=lambda row: row["bits"])}


def _short(value: float) -> str:
    return f"{value:,.0f}" if 100 <= value < 1e6 else f"{value:.2g}"


def peer_rows(content: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """Return the rows of peers."""
    return [row for row in content["rows"] if not STRATEGIES[row["variant"]].ours]


def peers(found: Sequence[Mapping[str, Any]]) -> Table:
    """Return the bytes, the variance and the bias of peers' schemes and of the library."""
    spec: tuple[Column, ...] = (
        ("", "{network}"),
        ("", lambda row: NAMES.get(row["variant"], "gact_graph")),
        ("bits", "{bits}"),
        ("saved", "{saved_bytes:2MB} MB"),
        ("variance", lambda row: _short(row["variance"])),
        # Where noise is so large, few draws show no bias.
        ("bias", lambda row: bias_of(row) if row["variance"] < _LARGE else ""),
    )
    order = ["L1", "L1+blocks", *NAMES]
    return table(
        spec,
        (
            {**row, "network": _NETWORKS[content["model"]]}
            for content in found
            for row in sorted(content["rows"], key=lambda r: (order.index(r["variant"]), r["bits"]))
        ),
    )
