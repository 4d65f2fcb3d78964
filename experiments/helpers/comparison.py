"""Comparison of strategies: trials, medians over rounds, tables with ratios, and winners."""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from experiments.helpers import tables
from experiments.helpers.command import Args
from experiments.helpers.kept import Kept
from experiments.helpers.runner import run
from experiments.helpers.strategies import STRATEGIES, Case
from experiments.helpers.tables import Column, Row, Table

MEASURES = {
    "saved_bytes": "saved for backward",
    "peak_bytes": "peak memory",
    "step_seconds": "time of a step",
}
"""Numbers that have a winner, and their names in sentences."""

TIMES = ("step_seconds", "step_process_seconds", "compile_seconds")

_SAME_LOSS = 1e-4  # sums come in another order

Rows = Mapping[str, Row]
Place = tuple[str, ...]


def ratio(
    head: str, name: str, to: str = "stock", inverse: bool = False, digits: int = 2
) -> Column:
    """Return a column: a number over that of ``stock`` or of the best ``peer``, or the inverse."""

    def text(row: Row) -> str:
        other = row[to] if to == "stock" else row["peers"].get(name, {})
        if not row.get(name) or not other.get(name):
            return ""
        times = row[name] / other[name]
        shown = 1 / times if inverse else times
        return f"{shown:.2g}x" if shown < 0.1 else f"{shown:.{digits}f}x"

    return head, text


def beside_stock(size: int, stock: int | None, shown: int | None = None) -> str:
    """Return the largest size that fits, and its ratio to stock PyG's.

    Args:
        size: The largest that fits; 0 if none does.
        stock: The largest for stock PyG; None or 0 gives no ratio.
        shown: The number in place of the size, such as the nodes of a graph.
    """
    if not size:
        return "none fits"
    return f"{size if shown is None else shown:,}" + (f" ({size / stock:.1f}x)" if stock else "")


def _label(row: Row) -> str:
    label, compiling = STRATEGIES[row["strategy"]].label, row.get("compile_seconds")
    # A difference of two times: noise may take it below 0.
    return label if compiling is None else f"{label}, compiled in {max(compiling, 0):.0f} s"


def _seconds(row: Row) -> str:
    seconds = row.get("step_seconds")
    return "" if seconds is None else f"{seconds:,.2f}"


def _quartiles(row: Row) -> str:
    quartiles = row.get("step_seconds_quartiles")
    return "{:,.2f} to {:,.2f}".format(*quartiles) if quartiles else ""


PEERS: tuple[Column, ...] = (
    ("", _label),
    ("saved, MB", "{saved_bytes:MB|unknown}"),
    ratio("of stock's", "saved_bytes"),
    ratio("of best peer's", "saved_bytes", "peer"),
    ("peak, MB", "{peak_bytes:MB|unknown}"),
    ratio("of stock's", "peak_bytes"),
    ratio("of best peer's", "peak_bytes", "peer"),
    ("s/step", _seconds),
    ("quartiles", _quartiles),
    ratio("of stock's", "step_seconds"),
    ratio("of best peer's", "step_seconds", "peer"),
    ("loss", "{loss:.3f}"),
)


def trials(
    args: Args, kept: Kept, cases: Mapping[Place, Case], rounds: int
) -> dict[Place, dict[str, Any]]:
    """Measure each case once a round, and return the medians.

    Args:
        args: Flags of the command; ``no_times`` drops the times.
        kept: Stores the results, in its ``rounds``.
        cases: The cases by their place in ``rounds``.
        rounds: The number of rounds over all cases.
    """
    dropped = TIMES if getattr(args, "no_times", False) else ()

    def trial(case: Case) -> dict[str, Any]:
        return {key: value for key, value in run(case).items() if key not in dropped}

    taken: dict[Place, list[Any]] = {place: [] for place in cases}
    for number in range(rounds):
        for place, case in cases.items():
            args.say(f"round {number + 1}, {', '.join(place)}" if rounds > 1 else ", ".join(place))
            taken[place].append(kept.once(("rounds", *place, number), trial, case))
    return {place: medians(results) for place, results in taken.items()}


def strategies(
    args: Args, file: str, names: Sequence[str], *settings: str, rounds: int = 1, **case: Any
) -> dict[str, dict[str, Any]]:
    """Measure a model with each strategy, and return the medians.

    Args:
        args: Flags of the command.
        file: See :meth:`experiments.helpers.command.Args.keep`, also for ``settings``.
        names: Names of :data:`experiments.helpers.strategies.STRATEGIES`.
        *settings: Flags on which the results depend.
        rounds: See :func:`trials`.
        **case: Attributes of the cases that no flag sets.
    """
    times = {} if not hasattr(args, "no_times") else {"times": not args.no_times}
    kept = args.keep(file, *settings, derive=lambda c: {"variants": medians_in(c)}, **times)
    cases: dict[Place, Case] = {(name,): Case.of(args, strategy=name, **case) for name in names}
    return {name: row for (name,), row in trials(args, kept, cases, rounds).items()}


def table(spec: Sequence[Column], by_strategy: Rows) -> Table:
    """Return a table with one row per strategy, or the reason for its absence.

    Args:
        spec: See :func:`experiments.helpers.tables.table`.
        by_strategy: Results; ratios are to those of ``stock``.
    """
    peers = {m: by_strategy[p] for m in MEASURES if (p := best(by_strategy, m, ours=False))}
    others = {"stock": by_strategy.get("stock", {}), "peers": peers}
    rows = ({"strategy": name, **row, **others} for name, row in by_strategy.items())
    return tables.table(spec, rows)


def peers(by_strategy: Rows) -> Table:
    """Return a table of the strategies that ran, relative to stock and to the best peer.

    A column without any entry is left out, such as times that were not measured, and ratios to
    stock where stock did not run.
    """
    ran = {n: by_strategy[n] for n in STRATEGIES if "reason" not in by_strategy.get(n, {"reason"})}
    head, rows = table(PEERS, ran)
    filled = [any(cells) for cells in zip(*rows, strict=True)]
    head, *rows = ((*itertools.compress(cells, filled),) for cells in (head, *rows))
    return Table(head, rows)


def medians(rounds: Sequence[Row]) -> dict[str, Any]:
    """Return the median of each number over the rounds with one; ``reason`` if none has any.

    With three rounds or more, ``step_seconds_quartiles`` has the first and the third quartile of
    the time of a step, by linear interpolation.
    """
    good = [each for each in rounds if "reason" not in each]
    if not good:
        return {"reason": rounds[-1]["reason"]}
    values = {name: [each[name] for each in good if each[name] is not None] for name in good[0]}
    numbers = {name: statistics.median(of) if of else None for name, of in values.items()}
    if len(times := values.get("step_seconds", [])) > 2:
        first, _, third = statistics.quantiles(times, n=4, method="inclusive")
        numbers["step_seconds_quartiles"] = [first, third]
    return numbers | {"rounds": len(good)}


def medians_in(content: Row) -> dict[str, Any]:
    """Return the medians of all ``rounds`` of a file."""

    def of(rounds: Any) -> dict[str, Any]:
        if isinstance(rounds, list):
            return medians(rounds)
        return {name: of(each) for name, each in rounds.items() if each}

    return of(content.get("rounds", {}))


def best(by_strategy: Rows, measure: str, ours: bool) -> str | None:
    """Return the strategy with the smallest number, among the library's or among the others."""
    values = {
        name: row[measure]
        for name, row in by_strategy.items()
        # save_on_cpu takes memory on the host too.
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
    """Return the strategies whose first loss differs from stock's, though it should be equal."""
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
