"""The paper's Table 3 in its layout: the deepest and the widest model within a memory."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from experiments.helpers.labels import LABELS
from experiments.helpers.paper import paper_growth


def head(found: Sequence[Mapping[str, Any]]) -> tuple[str, ...]:
    """Return the head of :func:`rows`."""
    variants = dict.fromkeys(row["variant"] for row in found)
    return ("memory", "", *(LABELS[name] for name in variants), "paper, 16 GB: L0, L1, L2")


def rows(found: Sequence[Mapping[str, Any]]) -> list[tuple[str, ...]]:
    """Return one row for each memory and dimension: the largest size, and its ratio to stock's.

    Args:
        found: ``memory``, ``vary``, ``variant`` and ``largest`` of each search.
    """
    sizes = {(row["memory"], row["vary"], row["variant"]): row["largest"] for row in found}
    variants = dict.fromkeys(row["variant"] for row in found)
    table = []
    for memory, vary in dict.fromkeys((row["memory"], row["vary"]) for row in found):
        stock = sizes.get((memory, vary, "stock"))
        cells = [_cell(sizes.get((memory, vary, variant)), stock) for variant in variants]
        table.append((memory, vary, *cells, paper_growth(vary)))
    return table


def _cell(size: int | None, stock: int | None) -> str:
    if size is None:
        return "not run"
    return f"{size:,} ({size / stock:.1f}x)" if stock else f"{size:,}"
