"""How long a training step takes with compressed contexts, beside the stock one.

``python -m experiments.step_time --dataset FILE.npz --models gat --levels lossless,L1 --bits 4``

For each model copies with the same weights, one stock and one wrapped for each level, take training
steps (forward, backward, update) in turn, so that all meet the same weather of a busy machine;
of two steps in a row the second is timed, and the medians are compared. With ``--busy N`` each also
takes its steps beside N processes that never rest.
"""

from __future__ import annotations

import argparse
import copy
import statistics
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from torch import nn

from datasets import Graph, load
from experiments.helpers.busy import BusyLoops
from experiments.helpers.data import NodeTask, prepare
from experiments.helpers.display import make_console, make_table, say
from experiments.helpers.options import LEVELS, Parser
from experiments.helpers.origin import origin
from experiments.helpers.subjects import (
    SUBJECTS,
    Subject,
    add_graph_flags,
    choose,
    exit_code,
    label,
    make,
    wrap_at,
    write_json,
)
from experiments.helpers.summary import dataset_name
from experiments.helpers.timing import as_stock, time_in_turn
from experiments.helpers.train import synchronize, training_step
from experiments.helpers.values import parse_bits, parse_blocks, parse_count, parse_device

_STOCK = "fp32"
_BUSY = ", busy"


def main(argv: list[str] | None = None) -> int:
    """Time the models and print the table; return the exit code as the main job does."""
    return exit_code("step_time", lambda: _run(argv))


def time_model(
    subject: Subject,
    graph: Graph,
    levels: Sequence[str],
    bits: int,
    rounds: int,
    device: torch.device,
    busy: int = 0,
    blocks: int | str = False,
) -> dict[str, Any]:
    """Return ``seconds`` of every step and ``median_seconds``, of ``fp32`` and of each level, and
    ``ratio``, each level's median over that of ``fp32``.

    With ``busy`` processes that never rest, ``slowdown`` tells how many times as long each takes
    beside them.
    """
    task = prepare(graph, subject.layout, device=device)
    stock = make(subject, task)
    models = {_STOCK: stock}
    models |= {level: wrap_at(copy.deepcopy(stock), level, bits, blocks=blocks) for level in levels}
    runners = {name: _runner(model, task, subject.lr) for name, model in models.items()}
    runners[_STOCK] = as_stock(runners[_STOCK])
    with BusyLoops(busy) as loops:
        beside = {f"{name}{_BUSY}": loops.beside(run) for name, run in runners.items() if busy}
        seconds = time_in_turn(runners | beside, rounds, untimed=1)
    medians = {name: statistics.median(times) for name, times in seconds.items()}
    slowdown = {name: medians[f"{name}{_BUSY}"] / medians[name] for name in runners if busy}
    return {
        "seconds": seconds,
        "median_seconds": medians,
        "ratio": {level: medians[level] / medians[_STOCK] for level in levels},
        **({"slowdown": slowdown} if busy else {}),
    }


def _runner(model: nn.Module, task: NodeTask, lr: float) -> Callable[[], None]:
    optimizer = torch.optim.Adam(model.parameters(), lr=lr)

    def step() -> None:
        training_step(model, optimizer, task)
        synchronize(task.x.device)

    return step


def _run(argv: list[str] | None) -> None:
    args = _parse(argv)
    graph = load(args.dataset, args.data_root)
    timings = {}
    for name in args.models:
        timings[name] = time_model(
            SUBJECTS[name],
            graph,
            args.levels,
            args.bits,
            args.rounds,
            args.device,
            args.busy,
            args.blocks,
        )
    _show(make_console(), timings, args)
    if args.out is not None:
        _write(timings, args, argv)


def _parse(argv: list[str] | None) -> argparse.Namespace:
    parser = Parser(prog="python -m experiments.step_time", description=__doc__.splitlines()[0])
    add_graph_flags(parser)
    parser.add_argument("--models", default="gcn,gat", help=f"of {', '.join(SUBJECTS)}")
    parser.add_argument("--levels", default="L1", help=f"of {', '.join(LEVELS)} (default: L1)")
    parser.add_argument(
        "--bits", type=parse_bits, default=4, metavar="B", help="of L1 (default: 4)"
    )
    parser.add_argument("--rounds", type=parse_count, default=5, metavar="R", help="default: 5")
    parser.add_argument(
        "--blocks",
        type=parse_blocks,
        default=False,
        metavar="N",
        help="message passing in blocks of N edges, or auto",
    )
    parser.add_argument(
        "--busy",
        type=parse_count,
        default=0,
        metavar="N",
        help="time each beside N processes that never rest, too",
    )
    parser.add_argument("--out", type=Path, metavar="FILE.json", help="keep all times here")
    args = parser.parse_args(argv)
    args.models = choose("--models", args.models, SUBJECTS)
    args.levels = choose("--levels", args.levels, LEVELS)
    args.device = parse_device(args.device)
    return args


def _show(console: Console, timings: dict[str, Any], args: argparse.Namespace) -> None:
    head = ["model", f"{_STOCK}, s"]
    for level in args.levels:
        head += [f"{label(level, args.bits)}, s", "ratio"]
    rows = []
    for name, timing in timings.items():
        row = [name, f"{timing['median_seconds'][_STOCK]:.3f}"]
        for level in args.levels:
            row += [f"{timing['median_seconds'][level]:.3f}", f"{timing['ratio'][level]:.3f}"]
        rows.append(row)
        if args.busy:
            slowdown = timing["slowdown"]
            row = [f"{name}, busy: times as long", f"{slowdown[_STOCK]:.2f}"]
            for level in args.levels:
                row += [f"{slowdown[level]:.2f}", f"{slowdown[level] / slowdown[_STOCK]:.2f}"]
            rows.append(row)
    console.print(make_table("A training step, median", head, rows))
    threads = torch.get_num_threads()
    say(console, f"{args.dataset}, {args.rounds} rounds in turn, {threads} threads, {args.device}")


def _write(timings: dict[str, Any], args: argparse.Namespace, argv: Sequence[str] | None) -> None:
    content = {
        "dataset": dataset_name(args.dataset),
        "levels": args.levels,
        "bits": args.bits,
        "rounds": args.rounds,
        "blocks": args.blocks,
        "busy": args.busy,
        "threads": torch.get_num_threads(),
        "device": str(args.device),
        **origin("step_time", argv),
        "models": timings,
    }
    write_json(args.out, content)


if __name__ == "__main__":
    sys.exit(main())
