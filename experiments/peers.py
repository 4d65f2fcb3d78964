"""Ways to train one network in less memory, side by side: peers and the library's levels.

``python -m experiments.peers --model gat --dataset FILE.npz --out DIR`` trains a few steps with
each in processes of their own, round by round over all of them, and shows the medians: bytes saved
for backward, peak over the start, time of a step, and the loss after the same steps.
"""

from __future__ import annotations

from experiments.helpers import command, comparison
from experiments.helpers.kept import write_atomically
from experiments.helpers.strategies import PEERS, STRATEGIES
from experiments.helpers.subjects import ON_EDGES
from experiments.helpers.summary import dataset_name


@command.main(
    *command.GRAPH,
    command.choice("--model", ON_EDGES, "gat"),
    command.names("--variants", STRATEGIES, ",".join(PEERS)),
    command.number("--rounds", 3),
    command.number("--steps", 8, "of each round"),
    *command.SIZES,
    command.NO_TIMES,
    command.OUT_NEEDED,
)
def main(args: command.Args) -> None:
    medians = comparison.strategies(
        *(args, "peers.json", args.variants, "model", "steps", "hidden", "layers"),
        **{"rounds": args.rounds, "model": ON_EDGES[args.model], "adaptive": True},
    )
    table = comparison.peers(medians)
    args.show(f"{args.model} on {dataset_name(args.dataset)}, {args.steps} steps", table)
    lines = comparison.remarks(medians)
    lines += [f"{name} begins with another loss." for name in comparison.strangers(medians)]
    for line in lines:
        args.say(line)
    text = f"{table.markdown()}\n\n" + "\n".join(lines) + "\n"
    write_atomically(args.out / "peers.md", text.encode())


if __name__ == "__main__":
    raise SystemExit(main())
