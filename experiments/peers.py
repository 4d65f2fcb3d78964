"""Ways to train one network in less memory, side by side: peers and the library's levels.

``python -m experiments.peers --model gat --dataset FILE.npz --out DIR`` trains a few steps with
each in processes of their own, round by round over all of them, and shows the medians: bytes saved
for backward, peak over the start, time of a step, and the loss after the same steps.
"""

from __future__ import annotations

import functools
from typing import Any

from experiments.helpers import command, comparison
from experiments.helpers.kept import write_atomically
from experiments.helpers.runner import run
from experiments.helpers.strategies import PEERS, STRATEGIES, Case
from experiments.helpers.subjects import ON_EDGES


def _medians(content: dict[str, Any]) -> dict[str, Any]:
    """In the order of the table, whatever the order in which strategies were asked for."""
    measured = content.get("rounds", {})
    rounds = {name: measured[name] for name in STRATEGIES if measured.get(name)}
    variants = {name: comparison.medians(each) for name, each in rounds.items()}
    return {"variants": variants, "rounds": rounds}


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
    settings, times = ("model", "steps", "hidden", "layers"), not args.no_times
    kept = args.keep("peers.json", *settings, derive=_medians, times=times)

    def trial(name: str) -> dict[str, Any]:
        result = run(Case.of(args, model=ON_EDGES[args.model], strategy=name, adaptive=True))
        dropped = () if times else comparison.TIMES
        return {key: value for key, value in result.items() if key not in dropped}

    rounds: dict[str, list[Any]] = {name: [] for name in args.variants}
    for number in range(args.rounds):
        for name in args.variants:
            args.say(f"round {number + 1}, {name}")
            place = ("rounds", name, number)
            rounds[name].append(kept.once(place, functools.partial(trial, name)))
    medians = {name: comparison.medians(each) for name, each in rounds.items()}
    table = comparison.peers(medians)
    args.show(f"{args.model} on {kept.content['dataset']}, {args.steps} steps", table)
    lines = comparison.remarks(medians)
    lines += [f"{name} begins with another loss." for name in comparison.strangers(medians)]
    for line in lines:
        args.say(line)
    text = f"{table.markdown()}\n\n" + "\n".join(lines) + "\n"
    write_atomically(args.out / "peers.md", text.encode())


if __name__ == "__main__":
    raise SystemExit(main())
