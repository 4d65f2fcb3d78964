"""Saved bytes against the error of the gradient: codes of this version, of 0.7.0, and of peers."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path, PurePath
from typing import Any, NamedTuple

import numpy as np

from experiments.helpers.gradients import bias_of
from experiments.helpers.strategies import STRATEGIES
from experiments.helpers.tables import Column, Table, cell, table

Curve = Sequence[tuple[float, float]]

NAMES = {"exact": "EXACT, projected", "exact-wide": "EXACT", "mesa": "Mesa", "gact": "GACT"}
"""Variants of ``experiments.variance``, and their names in tables and pictures."""

_LARGE = 10.0
"""A variance with which nothing trains."""

_NETWORKS = {
    "gcn": "GCN, 3 layers of 64",
    "gat": "GAT, 3 layers of 3 heads of 32",
    "gcnii": "GCNII, 8 layers of 64",
}


class Pair(NamedTuple):
    """The results of one command, with this version and with one before, mostly 0.7.0."""

    now: Mapping[str, Any]
    before: Mapping[str, Any]

    @property
    def network(self) -> str:
        """The network's name."""
        return _NETWORKS[self.now["model"]]

    @property
    def graph(self) -> str:
        """The graph's name."""
        return PurePath(self.now["dataset"]).stem

    @property
    def commits(self) -> str:
        """The commits, the older one first."""
        return f"{self.before['commit']}, {self.now['commit']}"

    def rows(self, bits: int) -> tuple[Mapping[str, Any], Mapping[str, Any]]:
        """The library's own rows of a width, now and before."""
        return rows_of(self.now)[bits], rows_of(self.before)[bits]


def pairs(folder: Path, before: str = "0.7.0") -> list[Pair]:
    """Return the results of ``experiments.variance`` that lie in a folder and in one below it."""

    def read(path: Path) -> dict[str, Any]:
        content: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        return content

    found = [Pair(read(folder / p.name), read(p)) for p in (folder / before).glob("*.json")]
    networks = [*_NETWORKS]
    return sorted(found, key=lambda pair: (networks.index(pair.now["model"]), pair.graph))


def rows_of(content: Mapping[str, Any]) -> dict[int, Mapping[str, Any]]:
    """Return the rows of the library itself, by bits."""
    rows = (row for row in content["rows"] if STRATEGIES[row["variant"]].ours)
    return {row["bits"]: row for row in sorted(rows, key=lambda row: row["bits"])}


def curve(content: Mapping[str, Any]) -> Curve:
    """Return saved bytes and the variance of the library itself, by bits."""
    return [(row["saved_bytes"], row["variance"]) for row in rows_of(content).values()]


def at(points: Curve, saved: float) -> float | None:
    """Return the variance at some bytes; its logarithm is linear between two points.

    >>> at([(1.0, 0.25), (3.0, 1.0)], 2.0), at([(1.0, 0.25), (3.0, 1.0)], 4.0)
    (0.5, None)
    """
    sizes, variances = zip(*points, strict=True)
    found = np.exp(np.interp(saved, sizes, np.log(variances), math.nan, math.nan))
    return None if math.isnan(found) else float(found)


def equal_bytes(found: Sequence[Pair]) -> Table:
    """Return the variance over that of 0.7.0 in its bytes at 2 bits, and in those of now."""
    rows = []
    for pair in found:
        (now, before), (line, old) = pair.rows(2), (curve(content) for content in pair)
        ours, theirs = at(line, before["saved_bytes"]), at(old, now["saved_bytes"])
        in_old = "" if ours is None else _short(ours / before["variance"])
        # 0.7.0 takes more bytes even at its fewest bits.
        in_new = f"below {_short(now['variance'] / old[0][1])}"
        if theirs is not None:
            in_new = _short(now["variance"] / theirs)
        sizes = _size(before), in_old, _size(now), in_new
        rows.append((pair.network, pair.graph, *sizes, pair.commits))
    head = ("0.7.0, 2 bits", "now in as many bytes", "now, 2 bits", "to 0.7.0 in as many bytes")
    return Table(("", "graph", *head, "commit"), rows)


def by_bits(found: Sequence[Pair]) -> Table:
    """Return bytes and variances of each width, with this version and with 0.7.0."""
    rows = []
    for pair in found:
        now, before = (rows_of(content) for content in pair)
        for bits in sorted(now.keys() | before.keys()):
            both = [_size(side[bits]) if bits in side else "" for side in (before, now)]
            rows.append((pair.network, str(bits), *both, pair.commits))
    return Table(("", "bits", "0.7.0", "now", "commit"), rows)


def _size(row: Mapping[str, Any]) -> str:
    return f"{cell('{saved_bytes:2MB} MB', row)}, {_short(row['variance'])}"


def _short(value: float) -> str:
    return f"{value:,.0f}" if 100 <= value < 1e6 else f"{value:.2g}"


def widths(found: Sequence[Pair]) -> Table:
    """Return the variance at 2 bits with widths of groups, and before them."""
    rows = []
    for pair in found:
        now, before = pair.rows(2)
        ratio = f"{now['variance'] / before['variance']:.2f}"
        rows.append((pair.network, _size(before), _size(now), ratio, pair.commits))
    return Table(("", "one width a tensor", "widths of groups", "ratio", "commit"), rows)


def with_peers(found: Sequence[Pair]) -> list[Pair]:
    """Return the results that have peers beside the library."""
    return [pair for pair in found if peer_rows(pair.now)]


def peer_rows(content: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """Return the rows of peers."""
    return [row for row in content["rows"] if not STRATEGIES[row["variant"]].ours]


def peers(found: Sequence[Pair]) -> Table:
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
            {**row, "network": pair.network}
            for pair in found
            for row in sorted(
                pair.now["rows"], key=lambda r: (order.index(r["variant"]), r["bits"])
            )
        ),
    )
