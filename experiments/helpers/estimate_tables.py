"""The tables of ``results/estimates.json``: what was predicted, and what budgets led to."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from experiments.helpers.markdown import markdown_table

WITHIN = 0.1
"""How far off a prediction may be to count as right, over what was measured."""

REFUSED = "refused"
"""In place of a way, where :func:`gact_graph.wrap` said that none fits."""


def predictions(found: Mapping[str, Any]) -> str:
    """Predicted and measured peak of each model on each graph in each way."""
    ways = [*dict.fromkeys(pair["way"] for pair in found["pairs"])]
    rows: dict[tuple[str, str], dict[str, str]] = {}
    for pair in found["pairs"]:
        row = rows.setdefault((pair["model"], pair["dataset"]), {})
        row[pair["way"]] = _beside(pair["predicted"], pair["measured"])
    table = markdown_table(
        ("model", "graph", *ways),
        [(*key, *(row.get(way, "") for way in ways)) for key, row in rows.items()],
    )
    return f"{table}\n\n{verdict(found['pairs'])}"


def budgets(found: Mapping[str, Any]) -> str:
    """What was given, the way that was chosen, and the peak."""
    rows = [
        (
            one["model"],
            one["dataset"],
            f"{one['memory'] / 1e6:,.0f}",
            one["for"],
            one["chosen"] or "ended by the cap",
            "" if one["peak"] is None else f"{one['peak'] / 1e6:,.0f}",
        )
        for one in found["budgets"]
    ]
    head = ("model", "graph", "budget, MB", "made for", "chosen", "peak, MB")
    kept = sum(is_kept(one) for one in found["budgets"])
    refused = sum(one["chosen"] == REFUSED for one in found["budgets"])
    said = f"Budgets kept: {kept} of {len(rows)}; refused although a strategy fits: "
    return f"{markdown_table(head, rows)}\n\n{said}{refused}."


def is_kept(budget: Mapping[str, Any]) -> bool:
    """Whether the steps took no more than they were given."""
    return budget["peak"] is not None and budget["peak"] <= budget["memory"]


def verdict(pairs: Sequence[Mapping[str, Any]]) -> str:
    """How many predictions were right, and the one furthest off."""
    off = [p["predicted"] / p["measured"] - 1 for p in pairs if p["measured"] is not None]
    if not off:
        return "Nothing was measured."
    within = sum(abs(value) <= WITHIN for value in off)
    return (
        f"{within} of {len(off)} predictions are within {WITHIN:.0%} of the measurement; the "
        f"largest error is {max(off, key=abs):+.0%}."
    )


def _beside(predicted: int, measured: int | None) -> str:
    seen = "does not fit" if measured is None else f"{measured / 1e6:,.0f}"
    return f"{predicted / 1e6:,.0f} / {seen}"
