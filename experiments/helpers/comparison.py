"""Strategies side by side: trials, medians over rounds, tables with ratios, and who wins."""

from __future__ import annotations

import functools
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from experiments.helpers.command import Args
from experiments.helpers.runner import run
from experiments.helpers.strategies import STRATEGIES, Case
from experiments.helpers.tables import Column, Row, Table, cell

MEASURES = {
    "saved_bytes": "saved for backward",
    "peak_bytes": "peak memory",
    "step_seconds": "time of a step",
}
"""Numbers that have a winner, and their names in sentences."""

TIMES = ("step_seconds", "step_process_seconds", "compile_seconds")

_NUMBERS = ("saved_bytes", "peak_bytes", *TIMES, "first_loss", "loss")

_SAME_LOSS = 1e-4  # sums come in another order

Rows = Mapping[str, Row]


def ratio(
    head: str, name: str, to: str = "stock", inverse: bool = False, digits: int = 2
) -> Column:
    """A number over that of ``stock`` or of the best ``peer``, or the inverse of that."""

    def text(row: Row) -> str:
        other = row[to] if to == "stock" else row["peers"].get(name, {})
        if not row.get(name) or not other.get(name):
            return ""
        times = row[name] / other[name]
        return f"{1 / times if inverse else times:.{digits}f}x"

    return head, text


PEERS: tuple[Column, ...] = (
    ("saved, MB", "{saved_bytes:MB|unknown}"),
    ratio("of stock's", "saved_bytes"),
    ratio("of best peer's", "saved_bytes", "peer"),
    ("peak, MB", "{peak_bytes:MB|unknown}"),
    ratio("of stock's", "peak_bytes"),
    ratio("of best peer's", "peak_bytes", "peer"),
    ("s/step", "{step_seconds:,.2f|unknown}"),
    ratio("of stock's", "step_seconds"),
    ratio("of best peer's", "step_seconds", "peer"),
    ("loss", "{loss:.3f}"),
)


def side_by_side(
    args: Args,
    file: str,
    key: str,
    strategies: Sequence[str],
    spec: Sequence[Column],
    settings: Sequence[str],
    meters: Sequence[str],
    **case: Any,
) -> None:
    """Measure a model with each strategy, and show the results.

    Args:
        args: Of the command.
        file: See :meth:`experiments.helpers.command.Args.keep`, as ``settings``.
        key: Of the results in the file.
        strategies: Names of :data:`experiments.helpers.strategies.STRATEGIES`.
        spec: The columns of the table.
        settings: Flags on which the results depend.
        meters: Of :func:`experiments.helpers.runner.run`.
        **case: Attributes of the case that no flag sets.
    """
    kept = args.keep(file, *settings)
    results = {}
    for name in strategies:
        args.say(name)
        trial = functools.partial(run, Case.of(args, strategy=name, **case), meters)
        results[name] = kept.once((key, name), trial)
    title = f"{args.model} on {kept.content['dataset']}, {args.bits} bit"
    args.show(title, table(spec, results))
    args.say(f"{args.steps} steps, {kept.content['threads']} threads, {args.device}")


def table(spec: Sequence[Column], by_strategy: Rows) -> Table:
    """Return a table: one row a strategy, or the reason for its absence.

    Args:
        spec: The columns after the first one; see :func:`experiments.helpers.tables.table`.
        by_strategy: Results; ratios are to those of ``stock``.
    """
    peers = {m: by_strategy[p] for m in MEASURES if (p := best(by_strategy, m, ours=False))}
    others = {"stock": by_strategy.get("stock", {}), "peers": peers}
    rows = []
    for name, result in by_strategy.items():
        if "reason" in result:
            rows.append((name, result["reason"], *[""] * (len(spec) - 1)))
        else:
            row = {**result, **others}
            rows.append((name, *(cell(t, row) if isinstance(t, str) else t(row) for _, t in spec)))
    return Table(["", *(head for head, _ in spec)], rows)


def peers(by_strategy: Rows) -> Table:
    """Return the strategies that ran beside stock and the best peer, by the names of tables.

    Times have columns only where they were taken.
    """
    ran = {name: row for name, row in by_strategy.items() if "reason" not in row}
    timed = any(row.get("step_seconds") is not None for row in ran.values())
    head, rows = table(PEERS if timed else [*PEERS[:6], PEERS[-1]], ran)
    lines = []
    for name, line in zip(ran, rows, strict=True):
        label, compiling = STRATEGIES[name].label, ran[name]["compile_seconds"]
        if compiling is not None and timed:
            # A difference of two times: noise may take it below 0.
            label += f", compiled in {max(compiling, 0):.0f} s"
        lines.append((label, *line[1:]))
    return Table(head, lines)


def medians(rounds: Sequence[Row]) -> dict[str, Any]:
    """Return the median of each number over the rounds with one; ``reason`` where none has any."""
    good = [each for each in rounds if "reason" not in each]
    if not good:
        return {"reason": rounds[-1]["reason"]}
    numbers: dict[str, Any] = {}
    for name in _NUMBERS:
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


def remarks(by_strategy: Rows) -> list[str]:
    """Return a sentence for each measure and its winner, and for each strategy that did not run."""
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
    reasons = {name: row["reason"] for name, row in by_strategy.items() if "reason" in row}
    return said + [f"Not run: {STRATEGIES[name].label} ({reasons[name]})." for name in reasons]


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
