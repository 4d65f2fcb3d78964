"""Memory and time of each level, of stock PyG and of torch's checkpoint on one model.

``python -m experiments.memory --model gat --dataset FILE.npz --out DIR`` takes a few steps with
each in a process of its own, prints a table and keeps it as JSON. ``--timeline`` names the tensors
that are alive at the peak of the last step, by the module or autograd node and the operation that
made them.
"""

from __future__ import annotations

from typing import Any

import torch

from datasets import Graph, load
from experiments.helpers import command, tables
from experiments.helpers.comparison import ratio, strategies, table
from experiments.helpers.errors import UsageError
from experiments.helpers.meters import train
from experiments.helpers.strategies import STRATEGIES, Case, registry_restored
from experiments.helpers.subjects import MODELS, SUBJECTS
from experiments.helpers.summary import dataset_name
from experiments.helpers.timeline import AtPeak

_VARIANTS = "stock,checkpoint,lossless,L1,lossless+blocks,L1+blocks,CB2-no-blocks,CB2"

_COLUMNS = (
    ("", "{strategy}"),
    ("saved, MB", "{saved_bytes:MB}"),
    ("peak, MB", "{peak_bytes:MB}"),
    ratio("reduction", "peak_bytes", inverse=True, digits=1),
    ("s/step", "{step_seconds:,.2f}"),
    ratio("to stock", "step_seconds"),
)

_ALIVE: tuple[tables.Column, ...] = (
    ("MB", "{bytes:1MB}"),
    ("tensors", "{count}"),
    ("made by", "{operation}"),
    ("in", "{place}"),
    ("phase", "{phase}"),
)


def alive(variants: dict[str, Any]) -> tables.Table:
    """Return the tensors at the peak of each strategy that take at least a hundredth of it."""
    rows = [
        {"strategy": STRATEGIES[name].label, **row}
        for name, found in variants.items()
        for row in found["rows"]
        if row["bytes"] >= found["peak_bytes"] / 100
    ]
    return tables.table([("", "{strategy}"), *_ALIVE], rows)


def _at_peak(case: Case, graph: Graph, steps: int) -> dict[str, Any]:
    with registry_restored():
        trainee = STRATEGIES[case.strategy].start(case, graph, torch.device(case.device))
        at_peak = AtPeak(trainee.model)
        train(trainee, steps, MODELS[case.model].lr, [lambda: at_peak])
    rows = at_peak.rows()
    return {"peak_bytes": sum(row["bytes"] for row in rows), "rows": rows}


@command.main(
    *command.GRAPH,
    command.choice("--model", SUBJECTS, "gat"),
    command.names("--variants", STRATEGIES, _VARIANTS),
    command.BITS,
    command.switch("--adaptive", "adaptive bits"),
    command.number("--steps", 4),
    command.switch("--timeline", "the tensors alive at the peak"),
    command.OUT_NEEDED,
)
def main(args: command.Args) -> None:
    settings = ("model", "bits", "steps", "adaptive")
    if args.timeline:
        for name in args.variants:
            if reason := STRATEGIES[name].missing(args.device):
                raise UsageError(f"Expected --variants that run here (got {name}: {reason})")
        graph, kept = load(args.dataset, args.data_root), args.keep("timeline.json", *settings)
        for name in args.variants:
            case = Case.of(args, strategy=name)
            kept.once(("variants", name), _at_peak, case, graph, args.steps)
        args.show("Alive at the peak", alive(kept.content["variants"]))
        return
    found = strategies(args, "memory.json", args.variants, *settings)
    title = f"{args.model} on {dataset_name(args.dataset)}, {args.bits} bit, {args.steps} steps"
    args.show(title, table(_COLUMNS, found))


if __name__ == "__main__":
    raise SystemExit(main())
