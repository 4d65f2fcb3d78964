"""Every way to train one network in less memory, side by side: peers and the library's levels.

``python -m experiments.peers --model gat --dataset FILE.npz --out DIR`` trains a few steps of each
in processes of their own, round by round over all of them, and tells the medians: bytes saved for
backward, peak over the start, time of a step, and the loss after the same steps. What was measured
is kept under ``--out``: the same command goes on from there.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

import torch

from experiments.helpers.display import make_console, make_table, say
from experiments.helpers.folder import hold_folder
from experiments.helpers.kept import read_kept
from experiments.helpers.markdown import markdown_table
from experiments.helpers.options import Parser
from experiments.helpers.origin import origin
from experiments.helpers.peers import comparison
from experiments.helpers.peers.trial import Specification, run_trial
from experiments.helpers.peers.ways import MODELS, WAYS
from experiments.helpers.subjects import add_graph_flags, choose, exit_code, write_json
from experiments.helpers.summary import dataset_name
from experiments.helpers.values import parse_count, parse_device

FILE_NAME = "peers.json"

_TIMES = ("step_seconds", "step_process_seconds", "compile_seconds")


def main(argv: list[str] | None = None) -> int:
    """Measure and show; return the exit code as the main job does."""
    return exit_code("peers", lambda: _run(argv))


def _run(argv: list[str] | None) -> None:
    args = _parse(argv)
    console = make_console()
    settings = {name: getattr(args, name) for name in ("model", "steps", "hidden", "layers")}
    settings |= {"dataset": dataset_name(args.dataset), "device": str(args.device)}
    settings |= {"threads": torch.get_num_threads(), "times": not args.no_times}
    with hold_folder(args.out, lambda text: say(console, text)):
        kept = read_kept(args.out / FILE_NAME, settings) or {"rounds": {}}
        measured = kept["rounds"]
        for number in range(args.rounds):
            for name in args.variants:
                rounds = measured.setdefault(name, [])
                if len(rounds) > number:
                    continue
                say(console, f"round {number + 1}, {name}")
                found = run_trial(
                    Specification(
                        *(args.model, name, args.dataset, args.data_root, str(args.device)),
                        *(args.steps, args.hidden, args.layers),
                    )
                )
                if args.no_times:
                    found = {key: value for key, value in found.items() if key not in _TIMES}
                rounds.append(found)
                # After each, so that the numbers so far survive.
                _write(args.out, settings | origin("peers", argv), measured)
    found = {name: comparison.medians(measured[name]) for name in args.variants}
    title = f"{args.model} on {settings['dataset']}, {args.steps} steps"
    console.print(make_table(title, comparison.head(found), comparison.rows(found)))
    for sentence in comparison.not_run(found):
        console.print(sentence)
    lines = comparison.verdicts(found)
    lines += [f"{name} begins with another loss." for name in comparison.strangers(found)]
    for line in lines:
        say(console, line)


def _write(out: Path, head: dict[str, Any], measured: dict[str, list[dict[str, Any]]]) -> None:
    # In the order of the table, whatever the order in which they were asked for.
    order = [name for name in WAYS if name in measured]
    found = {name: comparison.medians(measured[name]) for name in order}
    content = head | {"variants": found, "rounds": {name: measured[name] for name in order}}
    write_json(out / FILE_NAME, content)
    table = markdown_table(comparison.head(found), comparison.rows(found))
    sentences = [*comparison.verdicts(found), *comparison.not_run(found)]
    (out / "peers.md").write_text(f"{table}\n\n" + "\n".join(sentences) + "\n")


def _parse(argv: list[str] | None) -> argparse.Namespace:
    parser = Parser(prog="python -m experiments.peers", description=__doc__.splitlines()[0])
    add_graph_flags(parser)
    parser.add_argument("--model", choices=tuple(MODELS), default="gat", help="default: gat")
    parser.add_argument(
        "--variants", default=",".join(WAYS), help=f"of {', '.join(WAYS)} (default: all)"
    )
    parser.add_argument("--rounds", type=parse_count, default=3, metavar="R", help="default: 3")
    parser.add_argument(
        "--steps", type=parse_count, default=8, metavar="N", help="of each round (default: 8)"
    )
    parser.add_argument("--hidden", type=parse_count, metavar="N", help="default: the model's")
    parser.add_argument("--layers", type=parse_count, metavar="N", help="default: the model's")
    parser.add_argument(
        "--no-times", action="store_true", help="leave times out: the machine does other work"
    )
    parser.add_argument("--out", type=Path, required=True, metavar="DIR", help="for the results")
    args = parser.parse_args(argv)
    args.variants = choose("--variants", args.variants, WAYS)
    args.device = parse_device(args.device)
    return args


if __name__ == "__main__":
    sys.exit(main())
