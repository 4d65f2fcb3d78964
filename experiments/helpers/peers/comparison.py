"""Medians over the rounds, ratios to stock and to the best peer, and who wins."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from experiments.helpers.peers.ways import WAYS

MEASURES = {
    "saved_bytes": "saved for backward",
    "peak_bytes": "peak memory",
    "step_seconds": "time of a step",
}
"""What has a winner, and what to call it."""

NUMBERS = (*MEASURES, "step_process_seconds", "compile_seconds", "first_loss", "loss")

_SAME_LOSS = 1e-4  # sums come in another order

Found = Mapping[str, Mapping[str, Any]]


def medians(rounds: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The median of each number over the rounds that gave one; ``reason`` where none did."""
    good = [one for one in rounds if "reason" not in one]
    if not good:
        return {"reason": rounds[-1]["reason"]}
    found: dict[str, Any] = {}
    for name in NUMBERS:
        values = [one[name] for one in good if one.get(name) is not None]
        found[name] = statistics.median(values) if values else None
    return found | {"rounds": len(good)}


def best(found: Found, measure: str, ours: bool) -> str | None:
    """Who has the smallest number: among the library's ways, or among all others."""
    values = {
        name: row[measure]
        for name, row in found.items()
        # On the host it takes memory too.
        if WAYS[name].ours == ours and row.get(measure) is not None and name != "save_on_cpu"
    }
    return min(values, key=lambda name: values[name]) if values else None


def head(found: Found) -> tuple[str, ...]:
    """What is over the columns of :func:`rows`; times have one only where they were taken."""
    columns = [""]
    for measure, unit in (("saved_bytes", "saved, MB"), ("peak_bytes", "peak, MB")):
        if _has(found, measure):
            columns += [unit, "of stock's", "of best peer's"]
    if _has(found, "step_seconds"):
        columns += ["s/step", "of stock's", "of best peer's"]
    return (*columns, "loss")


def not_run(found: Found) -> list[str]:
    """A sentence for each way that could not run, with the reason."""
    return [
        f"Not run: {WAYS[name].label} ({row['reason']})."
        for name, row in found.items()
        if "reason" in row
    ]


def rows(found: Found) -> list[tuple[str, ...]]:
    """One row a way that ran, under :func:`head`."""
    shown = [measure for measure in MEASURES if _has(found, measure)]
    table: list[tuple[str, ...]] = []
    for name, row in found.items():
        if "reason" in row:
            continue
        label = WAYS[name].label
        if row["compile_seconds"] is not None and "step_seconds" in shown:
            # A difference of two times: noise may take it below 0.
            label += f", compiled in {max(row['compile_seconds'], 0):.0f} s"
        cells = [label]
        for measure in shown:
            cells += _cells(found, row, measure)
        table.append((*cells, f"{row['loss']:.3f}"))
    return table


def _has(found: Found, measure: str) -> bool:
    return any(row.get(measure) is not None for row in found.values())


def _cells(found: Found, row: Mapping[str, Any], measure: str) -> list[str]:
    value = row[measure]
    if value is None:
        return ["unknown", "", ""]
    peer = best(found, measure, ours=False)
    others = (found.get("stock", {}), found[peer] if peer else {})
    ratios = [f"{value / other[measure]:.2f}x" if other.get(measure) else "" for other in others]
    amount = f"{value:.2f}" if measure == "step_seconds" else f"{value / 1e6:,.0f}"
    return [amount, *ratios]


def verdicts(found: Found) -> list[str]:
    """One sentence a measure: who wins it, and by how much."""
    said = []
    for measure, what in MEASURES.items():
        ours, peer = best(found, measure, ours=True), best(found, measure, ours=False)
        if ours is None or peer is None:
            continue
        mine, theirs = found[ours][measure], found[peer][measure]
        winner, other, times = (
            (ours, peer, theirs / mine) if mine <= theirs else (peer, ours, mine / theirs)
        )
        whose = "gact_graph" if winner == ours else "a peer"
        said.append(
            f"Least {what}: {whose}, {WAYS[winner].label}, {times:.2f} times less than "
            f"{WAYS[other].label}."
        )
    return said


def strangers(found: Found) -> list[str]:
    """The ways whose first loss is not stock's, though they compute the same."""
    stock = found.get("stock", {}).get("first_loss")
    if stock is None:
        return []
    return [
        name
        for name, row in found.items()
        if row.get("first_loss") is not None
        and not WAYS[name].rounds_forward
        and abs(row["first_loss"] - stock) > _SAME_LOSS * max(1.0, abs(stock))
    ]
