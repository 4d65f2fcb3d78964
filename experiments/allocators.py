"""Time and peak of a training step under each CPU allocator.

``python -m experiments.allocators --dataset FILE.npz --models gat,gcn --out FILE.json`` takes a few
steps of each strategy in processes of their own, one allocator after the other in each round: the
memory that gact_graph keeps, jemalloc preloaded, set to keep freed memory or with its defaults,
and glibc's malloc alone.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import sys
from typing import Any

from experiments.helpers import command, comparison
from experiments.helpers.allocators import ALLOCATORS
from experiments.helpers.case import Case
from experiments.helpers.display import say, show
from experiments.helpers.labels import LAYERS
from experiments.helpers.runner import run
from experiments.helpers.strategies import STRATEGIES
from experiments.helpers.subjects import ON_EDGES

HEAD = ("", "", *ALLOCATORS.values())


def rows(results: dict[str, dict[str, dict[str, dict[str, Any]]]]) -> list[tuple[str, ...]]:
    """Return a row for each model and strategy: seconds of a step and peak by allocator."""
    return [
        (
            LAYERS[ON_EDGES[model]],
            STRATEGIES[strategy].label,
            *(_cell(by_allocator.get(name, {"reason": "not run"})) for name in ALLOCATORS),
        )
        for model, strategies in results.items()
        for strategy, by_allocator in strategies.items()
    ]


def _cell(row: dict[str, Any]) -> str:
    if "reason" in row:
        return str(row["reason"])
    return f"{row['step_seconds']:.2f} s, {row['peak_bytes'] / 1e6:,.0f} MB"


def _medians(content: dict[str, Any]) -> dict[str, Any]:
    medians = {
        model: {
            strategy: {name: comparison.medians(each) for name, each in results.items() if each}
            for strategy, results in strategies.items()
        }
        for model, strategies in content.get("rounds", {}).items()
    }
    return {"medians": medians}


def _run(args: argparse.Namespace) -> None:
    kept = command.keep(args, None, "steps", derive=_medians)
    results: dict[str, Any] = {}
    trials = itertools.product(range(args.rounds), args.models, args.variants, ALLOCATORS)
    for number, model, strategy, allocator in trials:
        say(args.console, f"round {number + 1}, {model}, {strategy}, {allocator}")
        more = {"model": ON_EDGES[model], "strategy": strategy, "allocator": allocator}
        case = Case.of(args, **more, adaptive=True)
        place = ("rounds", model, strategy, allocator, number)
        by_allocator = results.setdefault(model, {}).setdefault(strategy, {})
        result = kept.once(place, functools.partial(run, case))
        by_allocator.setdefault(allocator, []).append(result)
    title = f"{kept.content['dataset']}, {args.steps} steps"
    show(args.console, title, HEAD, rows(_medians({"rounds": results})["medians"]))


main = command.Command(
    "allocators",
    __doc__,
    _run,
    command.DATASET,
    command.DATA_ROOT,
    command.names("--models", ON_EDGES, "gat,gcn"),
    command.names("--variants", STRATEGIES, "stock-kept,lossless+blocks,L1-4+blocks"),
    command.number("--rounds", 3),
    command.number("--steps", 8, "of each round"),
    command.OUT_FILE,
)

if __name__ == "__main__":
    sys.exit(main())
