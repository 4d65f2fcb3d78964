"""The time of a training step with compressed contexts, beside the stock one.

``python -m experiments.step_time --dataset FILE.npz --models gat --levels lossless,L1 --bits 4``

Copies of each model with the same weights, one stock and one wrapped for each level, take training
steps in turn: see :func:`experiments.helpers.timing.time_models`. With ``--busy N``, each copy also
takes its steps beside N busy processes.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

from datasets import Graph, load
from experiments.helpers import command
from experiments.helpers.data import prepare
from experiments.helpers.levels import LEVELS, Level, label
from experiments.helpers.subjects import LAYERS, SUBJECTS, make
from experiments.helpers.tables import Column, Table, table
from experiments.helpers.timing import STOCK, time_models
from experiments.helpers.values import parse_blocks
from gact_graph.api.report.names import counted


def time_model(args: command.Args, name: str, graph: Graph) -> dict[str, Any]:
    """Time one model at each level; see :func:`experiments.helpers.timing.time_models`."""
    subject = SUBJECTS[name]
    task = prepare(graph, subject.layout, device=args.device)
    models = {STOCK: make(subject, task)}
    for level in args.levels:
        models[level] = Level(level, args.blocks).wrap(copy.deepcopy(models[STOCK]), args.bits)
    return time_models(models, lambda _: task, subject.lr, args.rounds, busy=args.busy)


def by_level(content: Mapping[str, Any]) -> Table:
    """Return one row for each model and level, also beside busy processes if there are any."""
    spec: list[Column] = [("", "{model}"), ("", "{level}"), ("s/step", "{seconds:.3f}")]
    spec.append(("relative", "{ratio:.2f}x"))
    if content["busy"]:
        beside = f"beside {content['busy']} busy processes"
        spec += [(beside, "{busy:.3f}"), ("times as long", "{slowdown:.2f}x")]
    blocks = ", blocks" if content["blocks"] else ""
    labels = {STOCK: "stock PyG"}
    labels |= {name: f"`{label(name, content['bits'])}`{blocks}" for name in content["levels"]}
    rows = [
        {
            **{"model": LAYERS.get(model, model), "level": text},
            **{"seconds": timing["median_seconds"][level], "ratio": timing["ratio"].get(level, 1)},
            "busy": timing["median_seconds"].get(f"{level}, busy"),
            "slowdown": timing.get("slowdown", {}).get(level),
        }
        for model, timing in content["models"].items()
        for level, text in labels.items()
    ]
    return table(spec, rows)


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
    for name in args.models:
        kept.once(("models", name), time_model, args, name, graph)
    args.show("A training step, median", by_level(kept.content))
    threads = counted(kept.content["threads"], "thread")
    rounds = counted(args.rounds, "round")
    args.say(f"{args.dataset}, {rounds} in turn, {threads}, {args.device}")


if __name__ == "__main__":
    raise SystemExit(main())
