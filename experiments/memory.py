"""What each level takes at its peak, and how long a step is: side by side, a fresh process each.

``python -m experiments.memory --model gat --dataset FILE.npz --out DIR`` prints a table, and writes
it as JSON with a plot of the memory over one step.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from experiments.helpers.display import make_console, make_table, say
from experiments.helpers.memory_plot import plot_curves
from experiments.helpers.options import Parser
from experiments.helpers.origin import origin
from experiments.helpers.plot import require_matplotlib
from experiments.helpers.subjects import SUBJECTS, add_graph_flags, choose, exit_code, write_json
from experiments.helpers.summary import dataset_name
from experiments.helpers.trial import Specification, run_trial
from experiments.helpers.values import parse_bits, parse_count, parse_device
from experiments.helpers.variants import VARIANTS

HEAD = ("", "saved, MB", "peak, MB", "stock / it", "s/step", "it / stock")


def main(argv: list[str] | None = None) -> int:
    """Measure and show; return the exit code as the main job does."""
    return exit_code("memory", lambda: _run(argv))


def table(found: Mapping[str, Mapping[str, Any] | None]) -> list[tuple[str, ...]]:
    """Return the rows under :data:`HEAD`; a variant that did not fit says so."""
    stock = found.get("stock")
    rows: list[tuple[str, ...]] = []
    for name, result in found.items():
        if result is None:
            rows.append((name, "does not fit", "", "", "", ""))
            continue
        saved = "" if result["saved_bytes"] is None else f"{result['saved_bytes'] / 1e6:,.0f}"
        less = slower = ""
        if stock is not None and name != "stock":
            less = f"{stock['peak_bytes'] / result['peak_bytes']:.1f}x"
            slower = f"{result['step_seconds'] / stock['step_seconds']:.2f}x"
        rows.append(
            (
                name,
                saved,
                f"{result['peak_bytes'] / 1e6:,.0f}",
                less,
                f"{result['step_seconds']:.2f}",
                slower,
            )
        )
    return rows


def _run(argv: list[str] | None) -> None:
    args = _parse(argv)
    require_matplotlib()
    console = make_console()
    args.out.mkdir(parents=True, exist_ok=True)
    head = {name: getattr(args, name) for name in ("model", "bits", "steps", "adaptive")}
    head |= {"dataset": dataset_name(args.dataset), "device": str(args.device)}
    threads = torch.get_num_threads()
    head |= {"threads": threads} | origin("memory", argv)
    found: dict[str, Any] = {}
    for variant in args.variants:
        say(console, variant)
        found[variant] = run_trial(
            Specification(
                args.model,
                variant,
                args.dataset,
                args.data_root,
                str(args.device),
                args.bits,
                args.steps,
                adaptive=args.adaptive,
            )
        )
        # After each, so that the numbers so far survive a variant that fails.
        write_json(args.out / "memory.json", head | {"variants": found})
    title = f"{args.model} on {dataset_name(args.dataset)}, {args.bits} bit"
    plot_curves({k: v for k, v in found.items() if v}, title, args.out / "memory.png")
    _show(console, title, found)
    say(console, f"{args.steps} steps, {threads} threads, {args.device}; peak over the start")


def _show(console: Console, title: str, found: Mapping[str, Any]) -> None:
    console.print(make_table(title, HEAD, table(found)))


def _parse(argv: list[str] | None) -> argparse.Namespace:
    parser = Parser(prog="python -m experiments.memory", description=__doc__.splitlines()[0])
    add_graph_flags(parser)
    parser.add_argument("--model", choices=tuple(SUBJECTS), default="gat", help="default: gat")
    usual = [name for name in VARIANTS if name != "L2"]  # which equals L1 without a GPU
    parser.add_argument(
        "--variants",
        default=",".join(usual),
        help=f"of {', '.join(VARIANTS)} (default: all but L2)",
    )
    parser.add_argument("--bits", type=parse_bits, default=4, metavar="B", help="default: 4")
    parser.add_argument(
        "--adaptive", action="store_true", help="adaptive bits; the second step has the sweep"
    )
    parser.add_argument("--steps", type=parse_count, default=4, metavar="N", help="default: 4")
    parser.add_argument("--out", type=Path, required=True, metavar="DIR", help="for the results")
    args = parser.parse_args(argv)
    args.variants = choose("--variants", args.variants, VARIANTS)
    args.device = parse_device(args.device)
    return args


if __name__ == "__main__":
    sys.exit(main())
