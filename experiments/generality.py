"""The paper's other half: a residual network and BERT with compressed contexts, on small tasks.

``python -m experiments.generality --model bert --out DIR`` trains in fp32 and with 4 and 2 bits and
prints score, loss, rate, peak and time.
"""

from __future__ import annotations

import argparse
import functools
import statistics
import sys
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import gact_graph
from experiments.helpers import command, meters, summary
from experiments.helpers.display import say, show
from experiments.helpers.errors import ExperimentError
from experiments.helpers.interval import paired_difference, signed_percent
from experiments.helpers.levels import Level
from experiments.helpers.process import call
from experiments.helpers.train import seed_everything
from experiments.helpers.values import FP32_BITS, parse_bits, parse_seeds
from experiments.models.general import FIELDS, Field, score_of

HEAD = ("", "seeds", "score, %", "to fp32", "last loss", "rate", "peak, MB", "step / fp32")

_POINTS = 40
"""Of a curve of the loss: means over equally many steps."""


def train_named(model: str, bits: int, seed: int, steps: int, batch: int) -> dict[str, Any]:
    """As :func:`train`, of a name of :data:`experiments.models.general.FIELDS`."""
    return train(FIELDS[model](), bits, seed, steps, batch)


def train(field: Field, bits: int, seed: int, steps: int, batch: int) -> dict[str, Any]:
    """Train one network; the same batches and the same dropout for all widths.

    Returns:
        ``score`` on held out examples, ``loss``, a curve, ``rate`` and ``stored_bytes`` of the
        saved contexts, ``peak_bytes`` over the start, weights included, and
        ``step_process_seconds``, the median time of this process.
    """
    # The libraries that the first step of a process loads are no network's own.
    inputs, classes = field.batch(batch, torch.Generator())
    F.cross_entropy(field.make()(inputs), classes).backward()
    seed_everything(seed)
    generator = torch.Generator().manual_seed(seed)
    model = field.make()
    Level("L0" if bits == FP32_BITS else "L1").wrap(model, bits, adaptive=True, seed=seed)

    def loss() -> Tensor:
        inputs, classes = field.batch(batch, generator)
        return F.cross_entropy(model(inputs), classes)

    taken = meters.train(meters.Trainee(model, loss), steps, field.lr)
    report = gact_graph.report(model)
    weights = sum(parameter.nbytes for parameter in model.parameters())
    return {
        "bits": bits,
        "seed": seed,
        "score": score_of(model, field.held_out),
        "loss": _curve(taken.losses),
        "rate": report.rate,
        "stored_bytes": report.stored_bytes,
        "peak_bytes": None if taken.peak_bytes is None else taken.peak_bytes + weights,
        "step_process_seconds": taken.medians["step_process_seconds"],
    }


def _curve(losses: list[float]) -> list[float]:
    size = -(-len(losses) // _POINTS)
    return [round(statistics.fmean(losses[i : i + size]), 5) for i in range(0, len(losses), size)]


def rows(runs: list[dict[str, Any]]) -> list[tuple[str, ...]]:
    """Return one row a width, under :data:`HEAD`."""
    widths = sorted({run["bits"] for run in runs}, reverse=True)
    by_width = {bits: [run for run in runs if run["bits"] == bits] for bits in widths}
    exact = by_width.get(FP32_BITS)
    lines: list[tuple[str, ...]] = []
    for bits, these in by_width.items():
        compressed = bits != FP32_BITS
        peaks = [run["peak_bytes"] for run in these if run["peak_bytes"] is not None]
        timed = exact and all("step_process_seconds" in run for run in (*exact, *these))
        lines.append(
            (
                f"{bits} bit" if compressed else "fp32",
                str(len(these)),
                summary.percent([run["score"] for run in these]),
                signed_percent(paired_difference(_scores(these), _scores(exact)))
                if compressed and exact
                else "",
                f"{statistics.fmean(run['loss'][-1] for run in these):.4f}",
                summary.factor([run["rate"] for run in these]),
                f"{statistics.median(peaks) / 1e6:,.0f}" if peaks else "unknown",
                f"{_time(these) / _time(exact):.2f}x" if exact and timed else "",
            )
        )
    return lines


def _scores(runs: list[dict[str, Any]]) -> dict[int, float]:
    return {run["seed"]: run["score"] for run in runs}


def _time(runs: list[dict[str, Any]]) -> float:
    return statistics.median(run["step_process_seconds"] for run in runs)


def _run(args: argparse.Namespace) -> None:
    network = FIELDS[args.model]().network
    kept = command.keep(args, f"{network}.json", "steps", "batch", model=network)
    for seed in args.seeds:
        for bits in args.bits:
            say(args.console, f"seed {seed}, {bits} bit")
            place = ("runs", {"bits": bits, "seed": seed})
            run = kept.once(place, functools.partial(_train_apart, args, bits, seed))
            if "reason" in run:
                raise ExperimentError(f"seed {seed}, {bits} bit: {run['reason']}")
    show(args.console, f"{network}, {args.steps} steps", HEAD, rows(kept.content["runs"]))


def _train_apart(args: argparse.Namespace, bits: int, seed: int) -> dict[str, Any]:
    function = "experiments.generality:train_named"
    run: dict[str, Any] = call(function, args.model, bits, seed, args.steps, args.batch)
    if args.no_times:
        run.pop("step_process_seconds", None)
    return run


main = command.Command(
    "generality",
    __doc__,
    _run,
    command.flag(
        "--model",
        choices=tuple(FIELDS),
        required=True,
        text="resnet is torchvision's ResNet-18 where torchvision imports, else a smaller network",
    ),
    command.several("--bits", parse_bits, "32,4,2"),
    command.flag("--seeds", parse_seeds, "0-2"),
    command.number("--steps", 300),
    command.number("--batch", 32),
    command.NO_TIMES,
    command.OUT_NEEDED,
)

if __name__ == "__main__":
    sys.exit(main())
