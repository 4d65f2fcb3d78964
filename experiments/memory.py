"""Peak, saved bytes and time of a step at each level, side by side, in a fresh process each.

``python -m experiments.memory --model gat --dataset FILE.npz --out DIR`` prints a table and keeps
it as JSON.
"""

from __future__ import annotations

import argparse
import functools
import sys

from experiments.helpers import command
from experiments.helpers.case import Case
from experiments.helpers.comparison import amount, ratio, table
from experiments.helpers.display import say, show
from experiments.helpers.runner import run
from experiments.helpers.strategies import STRATEGIES
from experiments.helpers.subjects import SUBJECTS

VARIANTS = (
    *("stock", "checkpoint", "lossless", "L1", "lossless+blocks", "L1+blocks", "CB1", "CB2"),
)
"""Measured by default."""

_COLUMNS = (
    amount("saved, MB", "saved_bytes"),
    amount("peak, MB", "peak_bytes"),
    ratio("stock / it", "peak_bytes", inverse=True, digits=1),
    amount("s/step", "step_seconds"),
    ratio("it / stock", "step_seconds"),
)


def _run(args: argparse.Namespace) -> None:
    kept = command.keep(args, "memory.json", "model", "bits", "steps", "adaptive")
    results = {}
    for variant in args.variants:
        say(args.console, variant)
        case = Case.of(args, strategy=variant)
        results[variant] = kept.once(("variants", variant), functools.partial(run, case, _METERS))
    title = f"{args.model} on {kept.content['dataset']}, {args.bits} bit"
    show(args.console, title, *table(_COLUMNS, results))
    say(args.console, f"{args.steps} steps, {kept.content['threads']} threads, {args.device}")


_METERS = ("saved", "device")

main = command.Command(
    "memory",
    __doc__,
    _run,
    *command.GRAPH,
    command.flag("--model", default="gat", choices=tuple(SUBJECTS)),
    command.names("--variants", STRATEGIES, ",".join(VARIANTS)),
    command.BITS,
    command.switch("--adaptive", "adaptive bits"),
    command.number("--steps", 4),
    command.OUT_NEEDED,
)

if __name__ == "__main__":
    sys.exit(main())
