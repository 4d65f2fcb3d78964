"""How good the bits are that one measurement finds, beside those of a pass for each slot.

``python -m experiments.allocation --dataset FILE.npz --bits 4,2 --out DIR``

The library measures the sensitivities of all slots at once; Algorithm 1 of the GACT paper takes a
pass for each. At some epochs of a training, both are measured and bits are allocated by each of
them; then the gradient is drawn many times under both, and so under the same bits everywhere. What
counts is the variance that these draws have, and their squared error, in which a bias counts too.
``DIR`` gets a JSON file for each model.
"""

from __future__ import annotations

import argparse
import copy
import statistics
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

import gact_graph
from datasets import load
from experiments.helpers.algorithm_1 import algorithm_1
from experiments.helpers.data import NodeTask, prepare
from experiments.helpers.display import make_console, make_table, say
from experiments.helpers.draws import measured
from experiments.helpers.errors import ExperimentError
from experiments.helpers.moments import moments
from experiments.helpers.options import Parser
from experiments.helpers.origin import origin
from experiments.helpers.subjects import (
    SUBJECTS,
    Subject,
    add_graph_flags,
    choose,
    exit_code,
    make,
    write_json,
)
from experiments.helpers.summary import dataset_name
from experiments.helpers.train import training_step
from experiments.helpers.values import parse_count, parse_device
from experiments.helpers.variants import VARIANTS, Variant, apply
from experiments.sensitivity import Probe
from gact_graph.adaptive.allocator import allocate_by_name

_WAYS = ("L1", "L1+blocks", "CB2")
_EXACT = VARIANTS["lossless"]


def study(
    subject: Subject,
    task: NodeTask,
    way: Variant,
    bits: int,
    epochs: int,
    points: int,
    draws: int,
) -> list[dict[str, Any]]:
    """Trains a model with adaptive bits, and compares at some epochs.

    Returns:
        For each of them the epoch, and by scheme the ``variance`` and the squared ``error`` of the
        gradient, over its squared length.
    """
    model = apply(make(subject, task), way, bits, adaptive=True)
    optimizer = torch.optim.Adam(model.parameters(), lr=subject.lr)
    every = max(1, epochs // points)
    found = []
    for epoch in range(1, epochs + 1):
        training_step(model, optimizer, task)
        if epoch % every == 0:
            found.append({"epoch": epoch} | _compare(model, task, way, bits, draws, seed=epoch))
    return found


def _compare(
    model: nn.Module, task: NodeTask, way: Variant, bits: int, draws: int, seed: int
) -> dict[str, Any]:
    plain = gact_graph.unwrap(copy.deepcopy(model))
    exact = Probe(apply(copy.deepcopy(plain), _EXACT, bits, adaptive=False), task).gradient(0)
    uniform = Probe(apply(copy.deepcopy(plain), way, bits, adaptive=False), task)
    free = {row.slot: row.numel for row in uniform.report.contexts if row.bits == bits}
    adaptive = apply(copy.deepcopy(plain), way, bits, adaptive=True)
    Probe(adaptive, task)  # whose first step is measured, with the same bits everywhere
    uniform.number = seed
    sensitivities = {
        "library": measured(adaptive),
        "algorithm 1": algorithm_1(free, lambda slot: bits, uniform),
    }
    if not all(sensitivities.values()):
        raise ExperimentError(f"Expected a finite gradient that is not zero (got none at {seed=})")
    found: dict[str, Any] = {"uniform": _errors(uniform, draws, exact)}
    for scheme, by_slot in sensitivities.items():
        given = allocate_by_name({s: by_slot.get(s, 0.0) for s in free}, free, bits, {})
        probe = Probe(apply(copy.deepcopy(plain), way, bits, adaptive=False, pin=given), task)
        found[scheme] = _errors(probe, draws, exact) | {"bits": given}
    return found


def _errors(probe: Probe, draws: int, exact: torch.Tensor) -> dict[str, float]:
    # Far from the numbers of the noise that was measured with.
    of = moments(lambda number: probe.gradient(1_000_000 + number), draws, exact)
    return {"variance": of.variance, "error": of.variance + max(0.0, of.bias_squared)}


def ratios(points: list[dict[str, Any]], of: str) -> tuple[float, float]:
    """The mean over points of the library's ``of``, over Algorithm 1's and over that of the same
    bits everywhere."""

    def mean(take: Callable[[dict[str, Any]], float]) -> float:
        return statistics.geometric_mean(map(take, points))

    return (
        mean(lambda point: point["library"][of] / point["algorithm 1"][of]),
        mean(lambda point: point["library"][of] / point["uniform"][of]),
    )


def main(argv: list[str] | None = None) -> int:
    """Measure; write a JSON a model; print a table; return the exit code as the main job does."""
    return exit_code("allocation", lambda: _run(argv))


def _run(argv: list[str] | None) -> None:
    args = _parse(argv)
    args.out.mkdir(parents=True, exist_ok=True)
    console = make_console()
    head = {key: getattr(args, key) for key in ("epochs", "points", "draws")}
    head |= {"dataset": dataset_name(args.dataset), "threads": torch.get_num_threads()}
    head |= origin("allocation", argv)
    graph = load(args.dataset, args.data_root)
    cells = []
    for name in args.models:
        subject = SUBJECTS[name]
        task = prepare(graph, subject.layout, device=args.device)
        rows: list[dict[str, Any]] = []
        for way in args.ways:
            for bits in args.bits:
                row = {"model": name, "way": way, "bits": bits}
                sizes = (args.epochs, args.points, args.draws)
                row["points"] = study(subject, task, VARIANTS[way], bits, *sizes)
                rows.append(row)
                cells.append(_cells(row))
                write_json(args.out / f"{name}.json", head | {"rows": rows})
    columns = ("model", "way", "bits", "variance", "error", "variance", "error")
    console.print(make_table("The library's bits, over those of Algorithm 1", columns, cells))
    say(console, "the last two columns: over the same bits everywhere")
    say(console, f"{args.points} points of {args.epochs} epochs, {args.draws} draws at each")


def _cells(row: dict[str, Any]) -> tuple[str, ...]:
    variance, error = ratios(row["points"], "variance"), ratios(row["points"], "error")
    numbers = (variance[0], error[0], variance[1], error[1])
    return row["model"], row["way"], str(row["bits"]), *(f"{number:.2f}" for number in numbers)


def _parse(argv: list[str] | None) -> argparse.Namespace:
    parser = Parser(prog="python -m experiments.allocation", description=__doc__.splitlines()[0])
    add_graph_flags(parser)
    models = "gcn-edge_index,gat,gatv2,transformer"
    parser.add_argument("--models", default=models, help=f"default: {models}")
    parser.add_argument("--ways", default=",".join(_WAYS), help="default: " + ",".join(_WAYS))
    parser.add_argument("--bits", default="4,2", help="default: 4,2")
    parser.add_argument("--epochs", type=parse_count, default=40, metavar="N", help="default: 40")
    parser.add_argument(
        "--points", type=parse_count, default=4, metavar="N", help="to compare at (default: 4)"
    )
    parser.add_argument(
        "--draws", type=parse_count, default=20, metavar="N", help="of the noise (default: 20)"
    )
    parser.add_argument("--out", type=Path, required=True, metavar="DIR", help="for the results")
    args = parser.parse_args(argv)
    args.device = parse_device(args.device)
    args.models = choose("--models", args.models, SUBJECTS)
    args.ways = choose("--ways", args.ways, _WAYS)
    args.bits = [int(bits) for bits in choose("--bits", args.bits, [*map(str, range(1, 9))])]
    return args


if __name__ == "__main__":
    sys.exit(main())
