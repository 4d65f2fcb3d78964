"""Memory and time of swapping saved tensors to host memory: the paper's Table 4, with the peak.

``python -m experiments.swap --model gat --dataset FILE.npz --out DIR`` prints a table and keeps it
as JSON. It needs a CUDA device. Memory of the device is counted between forward and backward.
"""

from __future__ import annotations

from experiments.helpers import command
from experiments.helpers.comparison import ratio, strategies, table
from experiments.helpers.errors import ExperimentError
from experiments.helpers.subjects import SUBJECTS
from experiments.helpers.summary import dataset_name

STRATEGIES = ("stock", "save_on_cpu", "L1", "L2-no-prefetch", "L2")

_COLUMNS = (
    ("", "{strategy}"),
    ("held, MB", "{held_bytes:MB}"),
    ("in host memory, MB", "{host_bytes:MB}"),
    ("peak, MB", "{peak_bytes:MB}"),
    ("s/step", "{step_seconds:,.3f}"),
    ratio("of stock's", "step_seconds"),
)


@command.main(
    *command.GRAPH,
    command.choice("--model", SUBJECTS, "gat"),
    command.BITS,
    command.number("--steps", 10),
    command.OUT_NEEDED,
)
def main(args: command.Args) -> None:
    if args.device.type != "cuda":
        raise ExperimentError(
            f"Expected a CUDA device, which saved tensors could leave (got {args.device}): "
            "experiments.memory measures L2 on a CPU, where files replace host memory"
        )
    settings = ("model", "bits", "steps")
    found = strategies(args, "swap.json", STRATEGIES, *settings, steps=args.steps + 1)
    title = f"{args.model} on {dataset_name(args.dataset)}, {args.bits} bit, {args.steps} steps"
    args.show(title, table(_COLUMNS, found))


if __name__ == "__main__":
    raise SystemExit(main())
