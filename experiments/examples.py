"""Memory and time of the scripts in examples/, beside stock PyG.

``python -m experiments.examples --out FILE.json`` runs each script for a few steps in a process of
its own, as stock PyG and with gact_graph in turn, without ``torchrun``. See
:func:`experiments.helpers.examples.measure` for the meaning of the numbers.
"""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Mapping
from typing import Any

from experiments.helpers import command
from experiments.helpers.examples import EXAMPLES, run
from experiments.helpers.tables import Column, Table, table

_STOCK, _OURS = _WAYS = ("stock PyG", "gact_graph")

_COLUMNS: tuple[Column, ...] = (
    ("", "`{example}.py`"),
    ("nodes", "{nodes:,}"),
    ("edges", "{edges:,}"),
    *((f"peak, {way}", f"{{peak_bytes[{way}]:MB}} MB") for way in _WAYS),
    *((f"s/step, {way}", f"{{step_seconds[{way}]:.2f}}") for way in _WAYS),
)


def by_example(content: Mapping[str, Any]) -> Table:
    """Return one row for each example: the graph of its first step, and medians of the rounds."""
    return table(_COLUMNS, itertools.starmap(_row, content["examples"].items()))


def _row(name: str, runs: Mapping[str, Any]) -> dict[str, Any]:
    row: dict[str, Any] = {"example": name}
    for way, measured in runs.items():
        first = measured[0] if measured else {"reason": "failed"}  # failures are not kept
        if "reason" in first:
            return row | {"reason": first["reason"]}
        row |= {size: first[size] for size in ("nodes", "edges")}
        for number in ("peak_bytes", "step_seconds"):
            row.setdefault(number, {})[way] = statistics.median(m[number] for m in measured)
    return row


@command.main(
    command.names("--examples", EXAMPLES),
    command.number("--nodes", text="in place of the example's"),
    command.number("--steps", 1, "of each run, after two that are not timed"),
    command.number("--rounds", 3),
    command.OUT_FILE,
)
def main(args: command.Args) -> None:
    kept = args.keep(None, "nodes", "steps", "rounds")
    for turn, name, way in itertools.product(range(args.rounds), args.examples, _WAYS):
        place = ("examples", name, way, turn)
        result = kept.once(place, run, name, way == _STOCK, args.steps, args.nodes)
        if "reason" in result:
            args.say(f"{name}, {way}: {result['reason']}")
    args.show("Peak of training over its start, and time of a step", by_example(kept.content))
    args.say(f"{args.rounds} rounds of {args.steps} steps, {kept.content['threads']} threads")


if __name__ == "__main__":
    raise SystemExit(main())
