"""How long a training step takes with compressed contexts, beside the stock one.

``python -m experiments.step_time --dataset FILE.npz --models gcn,gat --bits 4 --rounds 5``

For each model two copies with the same weights, one stock and one wrapped, take training steps
(forward, backward, update) in turn, so that both meet the same weather of a busy machine; after
one warm-up of each the medians are compared.
"""

from __future__ import annotations

import argparse
import copy
import json
import statistics
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from torch import nn

import gact_graph
from datasets import DatasetError, Graph, load
from experiments.atomic import write_atomically
from experiments.data import Layout, NodeTask, prepare
from experiments.display import make_console, make_table, say
from experiments.errors import ExperimentError, UsageError
from experiments.models import GAT, GCN
from experiments.options import Parser
from experiments.results import current_versions
from experiments.timing import time_in_turn
from experiments.train import seed_everything, synchronize, training_step
from experiments.values import parse_bits, parse_count, parse_device

_LR = 0.01


@dataclass(frozen=True)
class Subject:
    """A model to time: how its graph is laid out, and how it is made from F and C."""

    layout: Layout
    make: Any  # (in_channels, out_channels) -> nn.Module


# The set-up of DESIGN.md, section 1; GCN also as the main job runs it, on a sparse matrix.
SUBJECTS = {
    "gcn": Subject("csr", lambda i, o: GCN(i, 256, o, 3)),
    "gcn-edge_index": Subject("edge_index", lambda i, o: GCN(i, 256, o, 3, normalize=True)),
    "gat": Subject("edge_index", lambda i, o: GAT(i, 64, o, 3, heads=3)),
}


def main(argv: list[str] | None = None) -> int:
    """Time the models and print the table; return the exit code as the main job does."""
    try:
        args = _parse(argv)
        graph = load(args.dataset, args.data_root)
        timings = {}
        for name in args.models:
            timings[name] = time_model(SUBJECTS[name], graph, args.bits, args.rounds, args.device)
        _show(make_console(), timings, args)
        if args.out is not None:
            _write(timings, args)
    except ExperimentError as error:
        print(f"step_time: {error}", file=sys.stderr)
        return error.exit_code
    except DatasetError as error:
        print(f"step_time: {error}", file=sys.stderr)
        return 1
    return 0


def time_model(
    subject: Subject, graph: Graph, bits: int, rounds: int, device: torch.device
) -> dict[str, Any]:
    """Return seconds of every step, their medians, and ``ratio``: compressed over stock."""
    task = prepare(graph, subject.layout, device=device)
    seed_everything(0)
    stock = subject.make(task.x.size(1), task.num_classes).to(device)
    compressed = gact_graph.wrap(copy.deepcopy(stock), bits=bits, level="L1", adaptive=False)
    runners = {"fp32": _runner(stock, task), "compressed": _runner(compressed, task)}
    seconds = time_in_turn(runners, rounds)
    medians = {name: statistics.median(times) for name, times in seconds.items()}
    return {
        "seconds": seconds,
        "median_seconds": medians,
        "ratio": medians["compressed"] / medians["fp32"],
    }


def _runner(model: nn.Module, task: NodeTask) -> Callable[[], None]:
    optimizer = torch.optim.Adam(model.parameters(), lr=_LR)

    def step() -> None:
        training_step(model, optimizer, task)
        synchronize(task.x.device)

    return step


def _parse(argv: list[str] | None) -> argparse.Namespace:
    parser = Parser(prog="python -m experiments.step_time", description=__doc__.splitlines()[0])
    parser.add_argument("--dataset", default="digits", metavar="D", help="default: digits")
    parser.add_argument("--data-root", default="data", metavar="DIR", help="default: data")
    parser.add_argument("--models", default="gcn,gat", help=f"of {', '.join(SUBJECTS)}")
    parser.add_argument("--bits", type=parse_bits, default=4, metavar="B", help="default: 4")
    parser.add_argument("--rounds", type=parse_count, default=5, metavar="R", help="default: 5")
    parser.add_argument("--device", help="default: cuda where there is one, else cpu")
    parser.add_argument("--out", type=Path, metavar="FILE.json", help="keep all times here")
    args = parser.parse_args(argv)
    args.models = args.models.split(",")
    for name in args.models:
        if name not in SUBJECTS:
            raise UsageError(f"Expected --models of {', '.join(SUBJECTS)} (got {name!r})")
    args.device = parse_device(args.device)
    return args


def _show(console: Console, timings: dict[str, Any], args: argparse.Namespace) -> None:
    rows = [
        (
            name,
            f"{timing['median_seconds']['fp32']:.3f}",
            f"{timing['median_seconds']['compressed']:.3f}",
            f"{timing['ratio']:.3f}",
        )
        for name, timing in timings.items()
    ]
    head = ("model", "fp32, s", f"L1 {args.bits} bit, s", "ratio")
    console.print(make_table("A training step, median", head, rows))
    threads = torch.get_num_threads()
    say(console, f"{args.dataset}, {args.rounds} rounds in turn, {threads} threads, {args.device}")


def _write(timings: dict[str, Any], args: argparse.Namespace) -> None:
    content = {
        "dataset": args.dataset,
        "bits": args.bits,
        "rounds": args.rounds,
        "threads": torch.get_num_threads(),
        "device": str(args.device),
        "versions": current_versions(),
        "models": timings,
    }
    write_atomically(args.out, (json.dumps(content, indent=1) + "\n").encode())


if __name__ == "__main__":
    sys.exit(main())
