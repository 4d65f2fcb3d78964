"""Time and peak of a training step under each CPU allocator.

``python -m experiments.allocators --dataset FILE.npz --models gat,gcn --out FILE.json`` takes a few
steps of each strategy in processes of their own, one allocator after the other in each round: the
memory that gact_graph keeps, jemalloc preloaded, set to keep freed memory or with its defaults,
and glibc's malloc alone.
"""

from __future__ import annotations

import functools
import itertools
from typing import Any

from experiments.helpers import command
from experiments.helpers.comparison import medians
from experiments.helpers.process import ALLOCATORS
from experiments.helpers.runner import run
from experiments.helpers.strategies import STRATEGIES, Case
from experiments.helpers.subjects import LAYERS, ON_EDGES
from experiments.helpers.tables import Table


def by_allocator(results: dict[str, dict[str, dict[str, dict[str, Any]]]]) -> Table:
    """Return seconds of a step and peak by allocator, one row a model and strategy."""

    def cell(row: dict[str, Any]) -> str:
        if "reason" in row:
            return str(row["reason"])
        return f"{row['step_seconds']:.2f} s, {row['peak_bytes'] / 1e6:,.0f} MB"

    missing = {"reason": "not run"}
    rows = [
        (
            LAYERS[ON_EDGES[model]],
            STRATEGIES[name].label,
            *(cell(of.get(a, missing)) for a in ALLOCATORS),
        )
        for model, strategies in results.items()
        for name, of in strategies.items()
    ]
    return Table(("", "", *ALLOCATORS.values()), rows)


def _medians(content: dict[str, Any]) -> dict[str, Any]:
    by_model = {
        model: {
            strategy: {name: medians(each) for name, each in results.items() if each}
            for strategy, results in strategies.items()
        }
        for model, strategies in content.get("rounds", {}).items()
    }
    return {"medians": by_model}


@command.main(
    command.DATASET,
    command.DATA_ROOT,
    command.names("--models", ON_EDGES, "gat,gcn"),
    command.names("--variants", STRATEGIES, "stock-kept,lossless+blocks,L1-4+blocks"),
    command.number("--rounds", 3),
    command.number("--steps", 8, "of each round"),
    command.OUT_FILE,
)
def main(args: command.Args) -> None:
    kept = args.keep(None, "steps", derive=_medians)
    results: dict[str, Any] = {}
    trials = itertools.product(range(args.rounds), args.models, args.variants, ALLOCATORS)
    for number, model, strategy, allocator in trials:
        args.say(f"round {number + 1}, {model}, {strategy}, {allocator}")
        more = {"model": ON_EDGES[model], "strategy": strategy, "allocator": allocator}
        case = Case.of(args, **more, adaptive=True)
        result = kept.once(
            ("rounds", model, strategy, allocator, number), functools.partial(run, case)
        )
        of_strategy = results.setdefault(model, {}).setdefault(strategy, {})
        of_strategy.setdefault(allocator, []).append(result)
    table = by_allocator(_medians({"rounds": results})["medians"])
    args.show(f"{kept.content['dataset']}, {args.steps} steps", table)


if __name__ == "__main__":
    raise SystemExit(main())
