"""Memory and time of each level, of stock PyG and of torch's checkpoint on one model.

``python -m experiments.memory --model gat --dataset FILE.npz --out DIR`` takes a few steps with
each in a process of its own, prints a table and keeps it as JSON.
"""

from __future__ import annotations

from experiments.helpers import command
from experiments.helpers.comparison import ratio, strategies, table
from experiments.helpers.strategies import STRATEGIES
from experiments.helpers.subjects import SUBJECTS
from experiments.helpers.summary import dataset_name

_VARIANTS = "stock,checkpoint,lossless,L1,lossless+blocks,L1+blocks,CB1,CB2"

_COLUMNS = (
    ("", "{strategy}"),
    ("saved, MB", "{saved_bytes:MB}"),
    ("peak, MB", "{peak_bytes:MB}"),
    ratio("reduction", "peak_bytes", inverse=True, digits=1),
    ("s/step", "{step_seconds:,.2f}"),
    ratio("to stock", "step_seconds"),
)


@command.main(
    *command.GRAPH,
    command.choice("--model", SUBJECTS, "gat"),
    command.names("--variants", STRATEGIES, _VARIANTS),
    command.BITS,
    command.switch("--adaptive", "adaptive bits"),
    command.number("--steps", 4),
    command.OUT_NEEDED,
)
def main(args: command.Args) -> None:
    settings = ("model", "bits", "steps", "adaptive")
    found = strategies(args, "memory.json", args.variants, *settings)
    title = f"{args.model} on {dataset_name(args.dataset)}, {args.bits} bit, {args.steps} steps"
    args.show(title, table(_COLUMNS, found))


if __name__ == "__main__":
    raise SystemExit(main())
