"""Strategies side by side: medians over rounds, tables with ratios to stock, and who wins."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from experiments.helpers.strategies import STRATEGIES

MEASURES = {
    "saved_bytes": "saved for backward",
    "peak_bytes": "peak memory",
    "step_seconds": "time of a step",
}
"""Numbers that have a winner, and their names in sentences."""

NUMBERS = (*MEASURES, "step_process_seconds", "compile_seconds", "first_loss", "loss")

TIMES = ("step_seconds", "step_process_seconds", "compile_seconds")

_SAME_LOSS = 1e-4  # sums come in another order

Row = Mapping[str, Any]
Rows = Mapping[str, Row]

Column = tuple[str, Callable[[Row, Row], str]]
"""A head, and the text of a cell from a row and stock's."""


def amount(head: str, name: str, digits: int = 2) -> Column:
    """Bytes in MB, or seconds."""
    scale = 1e-6 if name.endswith("bytes") else 1.0
    digits = 0 if name.endswith("bytes") else digits

    def cell(row: Row, stock: Row) -> str:
        return "" if row.get(name) is None else f"{row[name] * scale:,.{digits}f}"

    return head, cell


def ratio(head: str, name: str, inverse: bool = False, digits: int = 2) -> Column:
    """A number over stock's, or the inverse of that; empty for stock itself."""

    def cell(row: Row, stock: Row) -> str:
        if row is stock or not row.get(name) or not stock.get(name):
            return ""
        times = row[name] / stock[name]
        return f"{1 / times if inverse else times:.{digits}f}x"

    return head, cell


def table(spec: Sequence[Column], by_strategy: Rows) -> tuple[list[str], list[tuple[str, ...]]]:
    """Return the head and the rows of a table: one row a strategy, or the reason why it has none.

    Args:
        spec: The columns after the first one.
        by_strategy: Results; ratios are to those of ``stock``.
    """
    stock = by_strategy.get("stock", {})
    rows = []
    for name, row in by_strategy.items():
        if "reason" in row:
            rows.append((name, row["reason"], *[""] * (len(spec) - 1)))
        else:
            rows.append((name, *(cell(row, stock) for _, cell in spec)))
    return ["", *(head for head, _ in spec)], rows


def medians(rounds: Sequence[Row]) -> dict[str, Any]:
    """Return the median of each number over the rounds with one; ``reason`` where none has any."""
    good = [each for each in rounds if "reason" not in each]
    if not good:
        return {"reason": rounds[-1]["reason"]}
    numbers: dict[str, Any] = {}
    for name in NUMBERS:
        values = [each[name] for each in good if each.get(name) is not None]
        numbers[name] = statistics.median(values) if values else None
    return numbers | {"rounds": len(good)}


def best(by_strategy: Rows, measure: str, ours: bool) -> str | None:
    """Return the strategy with the smallest number, among the library's or among all others."""
    values = {
        name: row[measure]
        for name, row in by_strategy.items()
        # On the host it takes memory too.
        if STRATEGIES[name].ours == ours and row.get(measure) is not None and name != "save_on_cpu"
    }
    return min(values, key=lambda name: values[name]) if values else None


def head(by_strategy: Rows) -> tuple[str, ...]:
    """Return the head of :func:`rows`; times have columns only where they were taken."""
    units = {"saved_bytes": "saved, MB", "peak_bytes": "peak, MB", "step_seconds": "s/step"}
    shown = [unit for measure, unit in units.items() if _has(by_strategy, measure)]
    return ("", *(text for u in shown for text in (u, "of stock's", "of best peer's")), "loss")


def not_run(by_strategy: Rows) -> list[str]:
    """Return a sentence for each strategy that could not run, with the reason."""
    return [
        f"Not run: {STRATEGIES[name].label} ({row['reason']})."
        for name, row in by_strategy.items()
        if "reason" in row
    ]


def rows(by_strategy: Rows) -> list[tuple[str, ...]]:
    """Return a row for each strategy that ran, under :func:`head`."""
    shown = [measure for measure in MEASURES if _has(by_strategy, measure)]
    lines: list[tuple[str, ...]] = []
    for name, row in by_strategy.items():
        if "reason" in row:
            continue
        label = STRATEGIES[name].label
        if row["compile_seconds"] is not None and "step_seconds" in shown:
            # A difference of two times: noise may take it below 0.
            label += f", compiled in {max(row['compile_seconds'], 0):.0f} s"
        cells = [text for measure in shown for text in _cells(by_strategy, row, measure)]
        lines.append((label, *cells, f"{row['loss']:.3f}"))
    return lines


def _has(by_strategy: Rows, measure: str) -> bool:
    return any(row.get(measure) is not None for row in by_strategy.values())


def _cells(by_strategy: Rows, row: Row, measure: str) -> list[str]:
    if row[measure] is None:
        return ["unknown", "", ""]
    peer = best(by_strategy, measure, ours=False)
    others = (by_strategy.get("stock", {}), by_strategy[peer] if peer else {})
    ratios = [f"{row[measure] / o[measure]:.2f}x" if o.get(measure) else "" for o in others]
    return [amount("", measure)[1](row, row), *ratios]


def verdicts(by_strategy: Rows) -> list[str]:
    """Return a sentence for each measure: who wins it, and by how much."""
    said = []
    for measure, name in MEASURES.items():
        ours, peer = best(by_strategy, measure, ours=True), best(by_strategy, measure, ours=False)
        if ours is None or peer is None:
            continue
        first, second = sorted((ours, peer), key=lambda each: by_strategy[each][measure])
        times = by_strategy[second][measure] / by_strategy[first][measure]
        said.append(
            f"Least {name}: {'gact_graph' if first == ours else 'a peer'}, "
            f"{STRATEGIES[first].label}, {times:.2f} times less than {STRATEGIES[second].label}."
        )
    return said


def strangers(by_strategy: Rows) -> list[str]:
    """Return the strategies whose first loss is not stock's, though they compute the same."""
    stock = by_strategy.get("stock", {}).get("first_loss")
    if stock is None:
        return []
    return [
        name
        for name, row in by_strategy.items()
        if row.get("first_loss") is not None
        and not STRATEGIES[name].rounds_forward
        and abs(row["first_loss"] - stock) > _SAME_LOSS * max(1.0, abs(stock))
    ]
