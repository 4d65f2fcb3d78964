"""Adaptive bits of the library compared with those of Algorithm 1 of the GACT paper.

``python -m experiments.allocation --dataset FILE.npz --bits 4,2 --out DIR``

The library measures the sensitivities of all slots at once; Algorithm 1 of the GACT paper takes a
pass for each slot. At some epochs of a training, the command measures both and allocates bits by
each. It then draws the gradient many times with both allocations, and with the same bits
everywhere. The allocations are compared by the variance of these draws, and by their squared error,
which includes the bias.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

import gact_graph
from datasets import load
from experiments.helpers import command
from experiments.helpers.data import NodeTask, prepare
from experiments.helpers.errors import ExperimentError
from experiments.helpers.levels import LEVELS_BY_NAME, Level
from experiments.helpers.noise import Probe, algorithm_1, moments, plain, squared_error
from experiments.helpers.strategies import LABELS
from experiments.helpers.subjects import LAYERS, SUBJECTS, Subject, make
from experiments.helpers.tables import Column, Table, table
from experiments.helpers.train import training_step
from experiments.helpers.values import parse_bits
from gact_graph.adaptive.allocator import allocate_by_name

_WAYS = ("L1", "L1+blocks", "CB2")


def ratios(points: list[dict[str, Any]], of: str) -> tuple[float, float]:
    """Return two geometric means over points: the library's ``of`` relative to that of Algorithm 1,
    and relative to that of the same bits everywhere."""

    def mean(other: str) -> float:
        return statistics.geometric_mean(p["library"][of] / p[other][of] for p in points)

    return mean("algorithm 1"), mean("uniform")


def by_way(rows: list[dict[str, Any]]) -> Table:
    """Return one row for each model, way and number of bits."""

    def mean(of: str, place: int) -> Callable[[Any], str]:
        return lambda row: f"{ratios(row['points'], of)[place]:.2f}"

    def spread(row: dict[str, Any]) -> str:
        apart = [p["library"]["variance"] / p["algorithm 1"]["variance"] for p in row["points"]]
        return f"{min(apart):.2f} to {max(apart):.2f}"

    spec: tuple[Column, ...] = (
        ("", lambda row: LAYERS[row["model"]]),
        ("", lambda row: LABELS[row["way"]]),
        ("bits", "{bits}"),
        ("to Algorithm 1", mean("variance", 0)),
        ("range over the points", spread),
        ("to uniform bits", mean("variance", 1)),
        ("squared error, to Algorithm 1", mean("error", 0)),
        ("to uniform bits", mean("error", 1)),
    )
    return table(spec, rows)


def study(
    subject: Subject, task: NodeTask, level: Level, bits: int, args: command.Args
) -> dict[str, Any]:
    """Train a model with adaptive bits, and compare the allocations at some epochs.

    Returns:
        ``points``, each with the epoch and, by scheme, the ``variance`` and the squared ``error``
        of the gradient, relative to its squared length.
    """
    model = level.wrap(make(subject, task), bits, adaptive=True)
    optimizer = torch.optim.Adam(model.parameters(), lr=subject.lr)
    every = max(1, args.epochs // args.points)
    results = []
    for epoch in range(1, args.epochs + 1):
        training_step(model, optimizer, task)
        if epoch % every == 0:
            results.append({"epoch": epoch} | _compare(model, task, level, bits, args.draws, epoch))
    return {"points": results}


def _compare(
    model: nn.Module, task: NodeTask, level: Level, bits: int, draws: int, seed: int
) -> dict[str, Any]:
    def probe(level: Level, **options: Any) -> Probe:
        return Probe(level.wrap(plain(model), bits, **options), task)

    def errors(probe: Probe) -> dict[str, float]:
        # Far from the numbers of the noise in the measurement.
        of = moments(lambda number: probe.gradient(1_000_000 + number), draws, exact)
        return {"variance": of["variance"], "error": squared_error(of)}

    exact = probe(LEVELS_BY_NAME["lossless"]).gradient(0)
    uniform = probe(level)
    free = {row.slot: row.numel for row in uniform.report.contexts if row.bits == bits}
    adaptive = level.wrap(plain(model), bits, adaptive=True)
    Probe(adaptive, task)  # its first step measures, with the same bits everywhere
    uniform.number = seed
    sensitivities = {
        "library": gact_graph.state_dict(adaptive)["scheme"]["sensitivities"],
        "algorithm 1": algorithm_1(free, lambda slot: bits, uniform),
    }
    if not all(sensitivities.values()):
        raise ExperimentError(f"Expected a finite gradient that is not zero (got none at {seed=})")
    results: dict[str, Any] = {"uniform": errors(uniform)}
    for scheme, by_slot in sensitivities.items():
        widths = allocate_by_name({s: by_slot.get(s, 0.0) for s in free}, free, bits, {})
        results[scheme] = errors(probe(level, pin=widths)) | {"bits": widths}
    return results


@command.main(
    *command.GRAPH,
    command.names("--models", SUBJECTS, "gcn-edge_index,gat,gatv2,transformer"),
    command.names("--ways", _WAYS),
    command.several("--bits", parse_bits, "4,2"),
    command.number("--epochs", 40),
    command.number("--points", 4, "to compare at"),
    command.draws(20),
    command.OUT_NEEDED,
)
def main(args: command.Args) -> None:
    graph = load(args.dataset, args.data_root)
    rows = []
    for name in args.models:
        kept = args.keep(f"{name}.json", "epochs", "points", "draws")
        subject = SUBJECTS[name]
        task = prepare(graph, subject.layout, device=args.device)
        for way in args.ways:
            for bits in args.bits:
                place = ("rows", {"model": name, "way": way, "bits": bits})
                level = LEVELS_BY_NAME[way]
                rows.append(kept.once(place, study, subject, task, level, bits, args))
    args.show("The variance with the library's bits, relative to others", by_way(rows))
    args.say(f"{args.points} points of {args.epochs} epochs, {args.draws} draws at each")


if __name__ == "__main__":
    raise SystemExit(main())
