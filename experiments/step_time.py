"""The time of a training step with compressed contexts, beside the stock one.

``python -m experiments.step_time --dataset FILE.npz --models gat --levels lossless,L1 --bits 4``

Copies of each model with the same weights, one stock and one wrapped for each level, take training
steps in turn: see :func:`experiments.helpers.timing.time_models`. With ``--busy N`` each also takes
its steps beside N processes that never rest.
"""

from __future__ import annotations

import copy
import functools
from typing import Any

from datasets import Graph, load
from experiments.helpers import command
from experiments.helpers.data import prepare
from experiments.helpers.levels import LEVELS, Level, label
from experiments.helpers.subjects import SUBJECTS, make
from experiments.helpers.tables import Column, table
from experiments.helpers.timing import STOCK, time_models
from experiments.helpers.values import parse_blocks


def time_model(args: command.Args, name: str, graph: Graph) -> dict[str, Any]:
    """Time one model at each level; see :func:`experiments.helpers.timing.time_models`."""
    subject = SUBJECTS[name]
    task = prepare(graph, subject.layout, device=args.device)
    models = {STOCK: make(subject, task)}
    for level in args.levels:
        models[level] = Level(level, args.blocks).wrap(copy.deepcopy(models[STOCK]), args.bits)
    return time_models(models, lambda _: task, subject.lr, args.rounds, busy=args.busy)


def _row(name: str, numbers: dict[str, float]) -> dict[str, Any]:
    ratios = {level: number / numbers[STOCK] for level, number in numbers.items()}
    return {"model": name, **numbers, "ratio": ratios}


@command.main(
    *command.GRAPH,
    command.names("--models", SUBJECTS, "gcn,gat"),
    command.names("--levels", LEVELS, "L1"),
    command.BITS,
    command.number("--rounds", 5),
    command.flag("--blocks", parse_blocks, "off", "blocks of N edges, auto or off", metavar="N"),
    command.number("--busy", 0, "time each beside N processes that never rest, too"),
    command.OUT_FILE,
)
def main(args: command.Args) -> None:
    graph = load(args.dataset, args.data_root)
    kept = args.keep(None, "levels", "bits", "rounds", "blocks", "busy")
    columns: list[Column] = [("model", "{model}"), (f"{STOCK}, s", f"{{{STOCK}:.3f}}")]
    for level in args.levels:
        columns.append((f"{label(level, args.bits)}, s", f"{{{level}:.3f}}"))
        columns.append(("ratio", f"{{ratio[{level}]:.2f}}"))
    rows = []
    for name in args.models:
        timing = kept.once(("models", name), functools.partial(time_model, args, name, graph))
        rows.append(_row(name, timing["median_seconds"]))
        if args.busy:
            rows.append(_row(f"{name}, busy: times as long", timing["slowdown"]))
    args.show("A training step, median", table(columns, rows))
    about = f"{args.rounds} rounds in turn, {kept.content['threads']} threads, {args.device}"
    args.say(f"{args.dataset}, {about}")


if __name__ == "__main__":
    raise SystemExit(main())
