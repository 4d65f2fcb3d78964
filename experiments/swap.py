"""Memory and time of swapping saved tensors to host memory: the paper's Table 4, with the peak.

``python -m experiments.swap --model gat --dataset FILE.npz --out DIR`` prints a table and keeps it
as JSON. It needs a CUDA device.
"""

from __future__ import annotations

import argparse
import functools
import sys

from experiments.helpers import command
from experiments.helpers.case import Case
from experiments.helpers.comparison import amount, ratio, table
from experiments.helpers.display import say, show
from experiments.helpers.errors import ExperimentError
from experiments.helpers.runner import run
from experiments.helpers.subjects import SUBJECTS

STRATEGIES = ("stock", "save_on_cpu", "L1", "L2-no-prefetch", "L2")

_COLUMNS = (
    amount("held, MB", "held_bytes"),
    amount("in host memory, MB", "host_bytes"),
    amount("peak, MB", "peak_bytes"),
    amount("s/step", "step_seconds", digits=3),
    ratio("of stock's", "step_seconds"),
)


def _run(args: argparse.Namespace) -> None:
    if args.device.type != "cuda":
        raise ExperimentError(
            f"Expected a CUDA device, which saved tensors could leave (got {args.device}): "
            "elsewhere L2 equals L1, which experiments.memory measures"
        )
    kept = command.keep(args, "swap.json", "model", "bits", "steps")
    results = {}
    for strategy in STRATEGIES:
        say(args.console, strategy)
        case = Case.of(args, strategy=strategy, steps=args.steps + 1)
        measure = functools.partial(run, case, ("device",))
        results[strategy] = kept.once(("ways", strategy), measure)
    show(
        args.console,
        f"{args.model} on {kept.content['dataset']}, {args.bits} bit",
        *table(_COLUMNS, results),
    )
    say(args.console, f"{args.steps} steps; held: by the device, from forward to backward")


main = command.Command(
    "swap",
    __doc__,
    _run,
    *command.GRAPH,
    command.flag("--model", default="gat", choices=tuple(SUBJECTS)),
    command.BITS,
    command.number("--steps", 10),
    command.OUT_NEEDED,
)

if __name__ == "__main__":
    sys.exit(main())
