"""Training on images and texts with compressed contexts, as in the GACT paper, on small tasks.

``python -m experiments.generality --model bert --out DIR`` trains in fp32 and with 4 and 2 bits and
prints score, loss, rate, peak and time.
"""

from __future__ import annotations

import statistics
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import gact_graph
from experiments.helpers import command, meters, summary
from experiments.helpers.errors import ExperimentError
from experiments.helpers.levels import Level
from experiments.helpers.process import call
from experiments.helpers.tables import Column, Table, table
from experiments.helpers.train import seed_everything
from experiments.helpers.values import FP32_BITS, parse_bits, parse_seeds
from experiments.models.general import FIELDS, score_of

_POINTS = 40
"""Points of a curve of the loss: means over equally many steps."""


def train(model: str, bits: int, seed: int, steps: int, batch: int) -> dict[str, Any]:
    """Train a network of :data:`experiments.models.general.FIELDS`, with the same batches and the
    same dropout for all widths.

    Returns:
        ``score`` on held out examples, ``loss``, a curve, ``rate`` and ``stored_bytes`` of the
        saved contexts, ``peak_bytes`` over the start, weights included, and
        ``step_process_seconds``, the median time of this process.
    """
    field = FIELDS[model]()
    # The first step of a process loads libraries, whose memory belongs to no network.
    inputs, classes = field.batch(batch, torch.Generator())
    F.cross_entropy(field.make()(inputs), classes).backward()
    seed_everything(seed)
    generator = torch.Generator().manual_seed(seed)
    level = Level("L0" if bits == FP32_BITS else "L1")
    network = level.wrap(field.make(), bits, adaptive=True, seed=seed)

    def loss() -> Tensor:
        inputs, classes = field.batch(batch, generator)
        return F.cross_entropy(network(inputs), classes)

    taken = meters.train(meters.Trainee(network, loss), steps, field.lr)
    report = gact_graph.report(network)
    weights = sum(parameter.nbytes for parameter in network.parameters())
    return {
        "bits": bits,
        "seed": seed,
        "score": score_of(network, field.held_out),
        "loss": _curve(taken.losses),
        "rate": report.rate,
        "stored_bytes": report.stored_bytes,
        "peak_bytes": None if taken.peak_bytes is None else taken.peak_bytes + weights,
        "step_process_seconds": taken.medians["step_process_seconds"],
    }


def _curve(losses: list[float]) -> list[float]:
    size = -(-len(losses) // _POINTS)
    return [round(statistics.fmean(losses[i : i + size]), 5) for i in range(0, len(losses), size)]


_COLUMNS: tuple[Column, ...] = (
    ("", "{width}"),
    ("seeds", "{seeds}"),
    ("score, %", "{score}"),
    ("to fp32", "{to_fp32}"),
    ("last loss", "{loss:.4f}"),
    ("rate", "{rate}"),
    ("peak, MB", "{peak:MB|unknown}"),
    ("step / fp32", "{time}"),
)


def by_width(runs: list[dict[str, Any]]) -> Table:
    """Return one row per width."""
    widths = sorted({run["bits"] for run in runs}, reverse=True)
    return table(_COLUMNS, [_row(runs, bits) for bits in widths])


def _row(runs: list[dict[str, Any]], bits: int) -> dict[str, Any]:
    these, exact = ([run for run in runs if run["bits"] == b] for b in (bits, FP32_BITS))
    scores, others = ({run["seed"]: run["score"] for run in part} for part in (these, exact))
    peaks = [run["peak_bytes"] for run in these if run["peak_bytes"] is not None]
    compressed = bits != FP32_BITS
    return {
        "width": f"{bits} bit" if compressed else "fp32",
        "seeds": len(these),
        "score": summary.percent([*scores.values()]),
        "to_fp32": summary.signed_percent(summary.paired_difference(scores, others))
        if compressed and exact
        else "",
        "loss": statistics.fmean(run["loss"][-1] for run in these),
        "rate": summary.factor([run["rate"] for run in these]),
        "peak": statistics.median(peaks) if peaks else None,
        "time": f"{_time(these) / _time(exact):.2f}x" if exact else "",
    }


def _time(runs: list[dict[str, Any]]) -> float:
    return statistics.median(run["step_process_seconds"] for run in runs)


@command.main(
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
    command.OUT_NEEDED,
)
def main(args: command.Args) -> None:
    network = FIELDS[args.model]().network
    kept = args.keep(f"{network}.json", "steps", "batch", model=network)
    for seed in args.seeds:
        for bits in args.bits:
            args.say(f"seed {seed}, {bits} bit")
            asked = (args.model, bits, seed, args.steps, args.batch)
            place = ("runs", {"bits": bits, "seed": seed})
            run = kept.once(place, call, "experiments.generality:train", *asked)
            if "reason" in run:
                raise ExperimentError(f"seed {seed}, {bits} bit: {run['reason']}")
    args.show(f"{network}, {args.steps} steps", by_width(kept.content["runs"]))


if __name__ == "__main__":
    raise SystemExit(main())
