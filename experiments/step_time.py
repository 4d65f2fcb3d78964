"""The time of a training step with compressed contexts, beside the stock one.

``python -m experiments.step_time --dataset FILE.npz --models gat --levels lossless,L1 --bits 4``

Copies of each model with the same weights, one stock and one wrapped for each level, take training
steps in turn: see :func:`experiments.helpers.timing.time_models`. With ``--busy N`` each also takes
its steps beside N processes that never rest.
"""

from __future__ import annotations

import argparse
import copy
import functools
import sys
from typing import Any

from datasets import Graph, load
from experiments.helpers import command
from experiments.helpers.data import prepare
from experiments.helpers.display import say, show
from experiments.helpers.labels import LEVELS, label
from experiments.helpers.levels import Level
from experiments.helpers.subjects import SUBJECTS, make
from experiments.helpers.timing import STOCK, time_models
from experiments.helpers.values import parse_blocks


def time_model(args: argparse.Namespace, name: str, graph: Graph) -> dict[str, Any]:
    """Time one model at each level; see :func:`experiments.helpers.timing.time_models`."""
    subject = SUBJECTS[name]
    task = prepare(graph, subject.layout, device=args.device)
    models = {STOCK: make(subject, task)}
    for level in args.levels:
        models[level] = Level(level, args.blocks).wrap(copy.deepcopy(models[STOCK]), args.bits)
    return time_models(models, lambda _: task, subject.lr, args.rounds, busy=args.busy)


def _run(args: argparse.Namespace) -> None:
    graph = load(args.dataset, args.data_root)
    settings = ("levels", "bits", "rounds", "blocks", "busy")
    kept = command.keep(args, None, *settings)
    rows = []
    for name in args.models:
        timing = kept.once(("models", name), functools.partial(time_model, args, name, graph))
        rows.append(_row(name, timing["median_seconds"], args.levels, digits=3))
        if args.busy:
            said = f"{name}, busy: times as long"
            rows.append(_row(said, timing["slowdown"], args.levels, digits=2))
    columns = [text for level in args.levels for text in (f"{label(level, args.bits)}, s", "ratio")]
    show(args.console, "A training step, median", ["model", f"{STOCK}, s", *columns], rows)
    about = f"{args.rounds} rounds in turn, {kept.content['threads']} threads, {args.device}"
    say(args.console, f"{args.dataset}, {about}")


def _row(name: str, numbers: dict[str, float], levels: list[str], digits: int) -> tuple[str, ...]:
    stock = numbers[STOCK]
    cells = [text for n in levels for text in (numbers[n], numbers[n] / stock)]
    return name, *(f"{value:.{digits}f}" for value in (stock, *cells))


main = command.Command(
    "step_time",
    __doc__,
    _run,
    *command.GRAPH,
    command.names("--models", SUBJECTS, "gcn,gat"),
    command.names("--levels", LEVELS, "L1"),
    command.BITS,
    command.number("--rounds", 5),
    command.flag("--blocks", parse_blocks, "off", "blocks of N edges, auto or off", metavar="N"),
    command.number("--busy", 0, "time each beside N processes that never rest, too"),
    command.OUT_FILE,
)

if __name__ == "__main__":
    sys.exit(main())
