"""What compression costs in time by the size of the graph, mini-batches included.

``python -m experiments.overhead --models gat --nodes 1000,10000,100000 --out FILE.json``

Each size is a block model of that many nodes, and is trained on as a whole; then there are
mini-batches of the largest one, each the subgraph of as many nodes as ``--batch`` says, drawn at
random. Stock and wrapped copies of a model take steps in turn, each on the same graphs, two in a
row of which the second is timed, after a few that are not: in these the wrapped one has found its
bits. The model is wrapped with the
library's defaults, so small graphs are left alone as they are for a user.
"""

from __future__ import annotations

import argparse
import copy
import dataclasses
import itertools
import statistics
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch_geometric.utils import subgraph

import gact_graph
from datasets.published import Size
from datasets.synthetic import block_model
from experiments.helpers.data import NodeTask, prepare
from experiments.helpers.display import make_console, make_table, say
from experiments.helpers.options import EXACT_LEVELS, LEVELS, Parser
from experiments.helpers.origin import origin
from experiments.helpers.subjects import (
    SUBJECTS,
    Subject,
    choose,
    exit_code,
    label,
    make,
    write_json,
)
from experiments.helpers.timing import as_stock, time_in_turn
from experiments.helpers.train import synchronize, training_step
from experiments.helpers.values import FP32_BITS, parse_bits, parse_count, parse_device

_STOCK = "fp32"
_FEATURES, _CLASSES = 128, 40
_UNTIMED = 4
"""Steps before the first that is timed: the second and the third measure sensitivities."""


def main(argv: list[str] | None = None) -> int:
    """Time the models and print the table; return the exit code as the main job does."""
    return exit_code("overhead", lambda: _run(argv))


def batches_of(task: NodeTask, nodes: int, count: int) -> list[NodeTask]:
    """Subgraphs of random nodes; all nodes of one are trained on."""
    generator = torch.Generator().manual_seed(0)
    found = []
    for _ in range(count):
        chosen = torch.randperm(len(task.x), generator=generator)[:nodes].to(task.x.device)
        edges, _ = subgraph(chosen, task.adjacency, relabel_nodes=True, num_nodes=len(task.x))
        every = torch.arange(len(chosen), device=task.x.device)
        found.append(
            dataclasses.replace(
                task, x=task.x[chosen], adjacency=edges, y=task.y[chosen], train_idx=every
            )
        )
    return found


def time_steps(
    subject: Subject,
    graphs: Sequence[NodeTask],
    levels: Sequence[str],
    bits: int,
    rounds: int,
    **sizes: int,
) -> dict[str, Any]:
    """Time steps on these graphs, one after another.

    Returns:
        ``nodes`` and ``edges`` of a graph on average, ``median_seconds`` of ``fp32`` and of each
        level, and ``ratio``, each level's median over that of ``fp32``.
    """
    stock = make(subject, graphs[0], **sizes)
    models = {_STOCK: stock}
    for level in levels:
        model_bits = FP32_BITS if level in EXACT_LEVELS else bits
        models[level] = gact_graph.wrap(copy.deepcopy(stock), bits=model_bits, level=level)
    runners = {
        name: _runner(model, itertools.cycle(graphs), subject.lr) for name, model in models.items()
    }
    runners[_STOCK] = as_stock(runners[_STOCK])
    for runner in runners.values():
        for _ in range(_UNTIMED):
            runner()
    seconds = time_in_turn(runners, rounds, untimed=1)
    medians = {name: statistics.median(times) for name, times in seconds.items()}
    return {
        "nodes": statistics.mean(len(graph.x) for graph in graphs),
        "edges": statistics.mean(graph.adjacency.size(1) for graph in graphs),
        "median_seconds": medians,
        "ratio": {level: medians[level] / medians[_STOCK] for level in levels},
    }


def _runner(model: nn.Module, graphs: Iterator[NodeTask], lr: float) -> Callable[[], None]:
    optimizer = torch.optim.Adam(model.parameters(), lr=lr)

    def step() -> None:
        task = next(graphs)
        training_step(model, optimizer, task)
        synchronize(task.x.device)

    return step


def _run(argv: list[str] | None) -> None:
    args = _parse(argv)
    found: dict[str, dict[str, Any]] = {name: {} for name in args.models}
    for nodes in args.nodes:
        size = Size(nodes, args.degree * nodes, _FEATURES, _CLASSES)
        task = prepare(block_model(size), "edge_index", device=args.device)
        graphs = {f"full batch, {nodes:,} nodes": [task]}
        if nodes == max(args.nodes):
            several = batches_of(task, min(args.batch, nodes), args.rounds)
            graphs[f"mini-batches of {min(args.batch, nodes):,} nodes"] = several
        for name, row in itertools.product(args.models, graphs):
            subject = SUBJECTS[name]
            sizes = {} if args.hidden is None else {"hidden": args.hidden}
            timing = time_steps(subject, graphs[row], args.levels, args.bits, args.rounds, **sizes)
            found[name][row] = timing
    _show(found, args)
    if args.out is not None:
        _write(found, args, argv)


def _parse(argv: list[str] | None) -> argparse.Namespace:
    known = [name for name, subject in SUBJECTS.items() if subject.layout == "edge_index"]
    parser = Parser(prog="python -m experiments.overhead", description=__doc__.splitlines()[0])
    parser.add_argument("--models", default="gcn-edge_index,gat", help=f"of {', '.join(known)}")
    parser.add_argument("--levels", default="lossless,L1", help=f"of {', '.join(LEVELS)}")
    parser.add_argument(
        "--nodes", type=_counts, default=(1000, 10_000, 100_000), metavar="N,N", help="the sizes"
    )
    parser.add_argument(
        "--degree", type=parse_count, default=14, metavar="D", help="edges a node (default: 14)"
    )
    parser.add_argument(
        "--batch", type=parse_count, default=20_000, metavar="N", help="nodes of a mini-batch"
    )
    parser.add_argument("--hidden", type=parse_count, metavar="N", help="default: the model's")
    parser.add_argument("--bits", type=parse_bits, default=4, metavar="B", help="default: 4")
    parser.add_argument("--rounds", type=parse_count, default=5, metavar="R", help="default: 5")
    parser.add_argument("--device", help="default: cuda where there is one, else cpu")
    parser.add_argument("--out", type=Path, metavar="FILE.json", help="keep the table here")
    args = parser.parse_args(argv)
    args.models = choose("--models", args.models, known)
    args.levels = choose("--levels", args.levels, LEVELS)
    args.device = parse_device(args.device)
    return args


def _counts(text: str) -> tuple[int, ...]:
    return tuple(sorted({parse_count(part) for part in text.split(",")}))


def _show(found: dict[str, dict[str, Any]], args: argparse.Namespace) -> None:
    console = make_console()
    head = ["", "edges", f"{_STOCK}, s", *(label(level, args.bits) for level in args.levels)]
    for name, rows in found.items():
        lines = [
            (
                row,
                f"{timing['edges']:,.0f}",
                f"{timing['median_seconds'][_STOCK]:.3f}",
                *(f"{timing['ratio'][level]:.2f}x" for level in args.levels),
            )
            for row, timing in rows.items()
        ]
        console.print(make_table(f"{name}: a training step, median", head, lines))
    threads = torch.get_num_threads()
    say(console, f"{args.rounds} rounds in turn, {threads} threads, {args.device}")


def _write(
    found: dict[str, dict[str, Any]], args: argparse.Namespace, argv: list[str] | None
) -> None:
    content = {
        "levels": args.levels,
        "bits": args.bits,
        "degree": args.degree,
        "hidden": args.hidden,
        "rounds": args.rounds,
        "threads": torch.get_num_threads(),
        "device": str(args.device),
        **origin("overhead", argv),
        "models": found,
    }
    write_json(args.out, content)


if __name__ == "__main__":
    sys.exit(main())
