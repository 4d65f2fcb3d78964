"""The paper's other half: a residual network and BERT with compressed contexts, on small tasks.

``python -m experiments.generality --model bert --out DIR`` trains in fp32 and with 4 and 2 bits and
tells score, loss, rate, peak and time. What was trained is kept under ``--out``: the same command
goes on from there.
"""

from __future__ import annotations

import argparse
import multiprocessing
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

import gact_graph
from experiments.helpers import summary
from experiments.helpers.display import make_console, make_table, say
from experiments.helpers.folder import hold_folder
from experiments.helpers.interval import paired_difference, signed_percent
from experiments.helpers.kept import read_kept
from experiments.helpers.options import Parser
from experiments.helpers.origin import origin
from experiments.helpers.subjects import exit_code, write_json
from experiments.helpers.train import seed_everything
from experiments.helpers.values import FP32_BITS, parse_bits, parse_count, parse_seeds
from experiments.models.general import FIELDS, Field, score_of
from gact_graph.support.peak import PeakMeter

HEAD = ("", "seeds", "score, %", "to fp32", "last loss", "rate", "peak, MB", "step / fp32")

_POINTS = 40
"""Of a curve of the loss: means over equally many steps."""


def train_apart(model: str, bits: int, seed: int, steps: int, batch: int) -> dict[str, Any]:
    """:func:`train` in a process of its own, whose memory holds nothing of trainings before.

    Args:
        model: One of :data:`experiments.models.general.FIELDS`.
    """
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        return pool.apply(_train_named, (model, torch.get_num_threads(), bits, seed, steps, batch))


def _train_named(model: str, threads: int, *settings: int) -> dict[str, Any]:
    torch.set_num_threads(threads)
    return train(FIELDS[model](), *settings)


def train(field: Field, bits: int, seed: int, steps: int, batch: int) -> dict[str, Any]:
    """Train one network; the same batches and the same dropout for all widths.

    Returns:
        ``score`` on what was held out, ``loss``, a curve, ``rate`` and ``stored_bytes`` of what
        autograd saves, ``peak_bytes`` over the start, and ``step_process_seconds``, the median time
        of this process.
    """
    # What the first step of a process loads and keeps is no network's own.
    inputs, classes = field.batch(batch, torch.Generator())
    F.cross_entropy(field.make()(inputs), classes).backward()
    seed_everything(seed)
    generator = torch.Generator().manual_seed(seed)
    losses: list[float] = []
    seconds: list[float] = []
    with PeakMeter(torch.device("cpu")) as meter:
        model = field.make()
        exact = bits == FP32_BITS
        gact_graph.wrap(
            model,
            bits=bits,
            level="L0" if exact else "L1",
            adaptive=not exact,
            min_bytes=0,
            seed=seed,
        )
        optimizer = torch.optim.Adam(model.parameters(), lr=field.lr)
        for _ in range(steps):
            inputs, classes = field.batch(batch, generator)
            start = time.process_time()
            optimizer.zero_grad(set_to_none=True)
            loss = F.cross_entropy(model(inputs), classes)
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
            seconds.append(time.process_time() - start)
    report = gact_graph.report(model)
    return {
        "bits": bits,
        "seed": seed,
        "score": score_of(model, field.held_out),
        "loss": _curve(losses),
        "rate": report.rate,
        "stored_bytes": report.stored_bytes,
        "peak_bytes": meter.peak_bytes,
        "step_process_seconds": statistics.median(seconds),
    }


def _curve(losses: list[float]) -> list[float]:
    size = -(-len(losses) // _POINTS)
    return [round(statistics.fmean(losses[i : i + size]), 5) for i in range(0, len(losses), size)]


def rows(runs: list[dict[str, Any]]) -> list[tuple[str, ...]]:
    """One row a width, under :data:`HEAD`."""
    widths = sorted({run["bits"] for run in runs}, reverse=True)
    by_width = {bits: [run for run in runs if run["bits"] == bits] for bits in widths}
    scores = {b: {run["seed"]: run["score"] for run in of} for b, of in by_width.items()}
    exact = by_width.get(FP32_BITS)
    found: list[tuple[str, ...]] = []
    for bits, these in by_width.items():
        compressed = bits != FP32_BITS
        peaks = [run["peak_bytes"] for run in these if run["peak_bytes"] is not None]
        timed = exact and all("step_process_seconds" in run for run in (*exact, *these))
        found.append(
            (
                f"{bits} bit" if compressed else "fp32",
                str(len(these)),
                summary.percent([run["score"] for run in these]),
                signed_percent(paired_difference(scores[bits], scores[FP32_BITS]))
                if compressed and exact
                else "",
                f"{statistics.fmean(run['loss'][-1] for run in these):.4f}",
                summary.factor([run["rate"] for run in these]),
                f"{statistics.median(peaks) / 1e6:,.0f}" if peaks else "unknown",
                f"{_time(these) / _time(exact):.2f}x" if exact and timed else "",
            )
        )
    return found


def _time(runs: list[dict[str, Any]]) -> float:
    return statistics.median(run["step_process_seconds"] for run in runs)


def main(argv: list[str] | None = None) -> int:
    """Train and show; return the exit code as the main job does."""
    return exit_code("generality", lambda: _run(argv))


def _run(argv: list[str] | None) -> None:
    args = _parse(argv)
    console = make_console()
    field = FIELDS[args.model]()
    settings = {"model": field.network, "steps": args.steps, "batch": args.batch}
    settings["threads"] = torch.get_num_threads()
    path = args.out / f"{field.network}.json"
    with hold_folder(args.out, lambda text: say(console, text)):
        runs = (read_kept(path, settings) or {"runs": []})["runs"]
        done = {(run["bits"], run["seed"]) for run in runs}
        for seed in args.seeds:
            for bits in args.bits:
                if (bits, seed) in done:
                    continue
                say(console, f"seed {seed}, {bits} bit")
                run = train_apart(args.model, bits, seed, args.steps, args.batch)
                if args.no_times:
                    del run["step_process_seconds"]
                runs.append(run)
                # After each, so that the runs so far survive.
                write_json(path, settings | origin("generality", argv) | {"runs": runs})
    console.print(make_table(f"{field.network}, {args.steps} steps", HEAD, rows(runs)))


def _parse(argv: list[str] | None) -> argparse.Namespace:
    parser = Parser(prog="python -m experiments.generality", description=__doc__.splitlines()[0])
    parser.add_argument(
        "--model",
        choices=tuple(FIELDS),
        required=True,
        help="resnet is torchvision's ResNet-18 where torchvision imports, else a smaller network",
    )
    parser.add_argument(
        "--bits", default="32,4,2", help="widths separated by commas (default: 32,4,2)"
    )
    parser.add_argument("--seeds", type=parse_seeds, default=(0, 1, 2), help="default: 0-2")
    parser.add_argument("--steps", type=parse_count, default=300, metavar="N", help="default: 300")
    parser.add_argument("--batch", type=parse_count, default=32, metavar="N", help="default: 32")
    parser.add_argument(
        "--no-times", action="store_true", help="leave times out: the machine does other work"
    )
    parser.add_argument("--out", type=Path, required=True, metavar="DIR", help="for the results")
    args = parser.parse_args(argv)
    try:
        args.bits = [parse_bits(text) for text in args.bits.split(",")]
    except argparse.ArgumentTypeError as error:
        parser.error(f"argument --bits: {error}")
    return args


if __name__ == "__main__":
    sys.exit(main())
