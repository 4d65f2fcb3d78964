"""Time and peak of a training step under each CPU allocator.

``python -m experiments.allocators --dataset FILE.npz --models gat,gcn --out FILE.json`` takes a few
steps of each strategy in separate processes, with one allocator after the other in each round: the
kept memory of gact_graph, jemalloc (preloaded, either set to keep freed memory or with its
defaults), and glibc's malloc alone.
"""

from __future__ import annotations

import itertools
from typing import Any

from experiments.helpers import command
from experiments.helpers.comparison import Place, medians_in, trials
from experiments.helpers.process import ALLOCATORS
from experiments.helpers.strategies import STRATEGIES, Case
from experiments.helpers.subjects import LAYERS, ON_EDGES
from experiments.helpers.tables import Table


def by_allocator(results: dict[str, dict[str, dict[str, dict[str, Any]]]]) -> Table:
    """Return seconds of a step and peak by allocator, one row per model and strategy."""

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


@command.main(
    command.DATASET,
    command.DATA_ROOT,
    command.names("--models", ON_EDGES, "gat,gcn"),
    command.names("--variants", STRATEGIES, "lossless+blocks,L1-4+blocks"),
    command.number("--rounds", 3),
    command.number("--steps", 8, "of each round"),
    command.OUT_FILE,
)
def main(args: command.Args) -> None:
    kept = args.keep(None, "steps", derive=lambda content: {"medians": medians_in(content)})
    cases: dict[Place, Case] = {
        (model, name, allocator): Case.of(
            args, model=ON_EDGES[model], strategy=name, allocator=allocator, adaptive=True
        )
        for model, name, allocator in itertools.product(args.models, args.variants, ALLOCATORS)
    }
    results: dict[str, Any] = {}
    for (model, strategy, allocator), row in trials(args, kept, cases, args.rounds).items():
        results.setdefault(model, {}).setdefault(strategy, {})[allocator] = row
    args.show(f"{kept.content['dataset']}, {args.steps} steps", by_allocator(results))


if __name__ == "__main__":
    raise SystemExit(main())
