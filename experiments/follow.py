"""How closely training with compressed contexts follows fp32, epoch by epoch.

``python -m experiments.follow --dataset FILE.npz --model gat --bits 4 --epochs 10``

A stock and a wrapped model with the same weights and the same dropout are trained one after the
other, so that memory holds one of them only.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Sequence
from pathlib import Path

import torch
from rich.console import Console

from datasets import load
from experiments.data import NodeTask, prepare
from experiments.display import make_console, make_table, say
from experiments.options import LEVELS, Parser
from experiments.results import current_versions
from experiments.subjects import (
    SUBJECTS,
    Subject,
    add_graph_flags,
    exit_code,
    label,
    make,
    wrap_at,
    write_json,
)
from experiments.train import training_step
from experiments.values import parse_bits, parse_count, parse_device


def main(argv: list[str] | None = None) -> int:
    """Train both and print the table; return the exit code as the main job does."""
    return exit_code("follow", lambda: _run(argv))


def losses(
    subject: Subject,
    task: NodeTask,
    epochs: int,
    level: str | None,
    bits: int,
    adaptive: bool = False,
) -> list[float]:
    """Return the training loss of every epoch; ``level`` ``None`` trains the stock model."""
    model = make(subject, task)
    if level is not None:
        wrap_at(model, level, bits, adaptive)
    optimizer = torch.optim.Adam(model.parameters(), lr=subject.lr)
    return [training_step(model, optimizer, task).item() for _ in range(epochs)]


def relative_differences(expected: Sequence[float], found: Sequence[float]) -> list[float]:
    """Return ``|found - expected| / |expected|`` of each pair; 0 for equal ones."""
    return [
        0.0 if a == b else abs(b - a) / abs(a) if a else math.inf
        for a, b in zip(expected, found, strict=True)
    ]


def largest(differences: Sequence[float]) -> float:
    """Return the largest; NaN, a training that broke, is larger than any."""
    return max(differences, key=lambda value: math.inf if math.isnan(value) else value)


def _run(argv: list[str] | None) -> None:
    args = _parse(argv)
    subject = SUBJECTS[args.model]
    task = prepare(load(args.dataset, args.data_root), subject.layout, device=args.device)
    stock = losses(subject, task, args.epochs, None, args.bits)
    compressed = losses(subject, task, args.epochs, args.level, args.bits, args.adaptive)
    _show(make_console(), stock, compressed, args)
    if args.out is not None:
        _write(stock, compressed, args)


def _parse(argv: list[str] | None) -> argparse.Namespace:
    parser = Parser(prog="python -m experiments.follow", description=__doc__.splitlines()[0])
    add_graph_flags(parser)
    parser.add_argument("--model", choices=tuple(SUBJECTS), default="gat", help="default: gat")
    parser.add_argument("--level", choices=LEVELS, default="L1", help="default: L1")
    parser.add_argument(
        "--bits", type=parse_bits, default=4, metavar="B", help="of L1 (default: 4)"
    )
    parser.add_argument("--adaptive", action="store_true", help="spend L1's bits by sensitivity")
    parser.add_argument("--epochs", type=parse_count, default=10, metavar="N", help="default: 10")
    parser.add_argument("--out", type=Path, metavar="FILE.json", help="keep all losses here")
    args = parser.parse_args(argv)
    args.device = parse_device(args.device)
    return args


def _show(
    console: Console, stock: list[float], compressed: list[float], args: argparse.Namespace
) -> None:
    differences = relative_differences(stock, compressed)
    rows = [
        (str(epoch), f"{a:.6f}", f"{b:.6f}", f"{difference:.2e}")
        for epoch, (a, b, difference) in enumerate(
            zip(stock, compressed, differences, strict=True), start=1
        )
    ]
    head = ("epoch", "fp32 loss", f"{label(args.level, args.bits)} loss", "relative difference")
    console.print(make_table(f"Training {args.model}", head, rows))
    say(console, f"largest relative difference: {largest(differences):.2e}")
    say(console, f"{args.dataset}, {torch.get_num_threads()} threads, {args.device}")


def _write(stock: list[float], compressed: list[float], args: argparse.Namespace) -> None:
    differences = relative_differences(stock, compressed)
    content = {
        "dataset": args.dataset,
        "model": args.model,
        "level": args.level,
        "bits": args.bits,
        "adaptive": args.adaptive,
        "threads": torch.get_num_threads(),
        "device": str(args.device),
        "versions": current_versions(),
        "fp32_loss": stock,
        "compressed_loss": compressed,
        "relative_difference": differences,
        "largest": largest(differences),
    }
    write_json(args.out, content)


if __name__ == "__main__":
    sys.exit(main())
