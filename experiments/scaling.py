"""How deep, how wide, or how large a graph trains within a memory: the paper's Table 3.

``python -m experiments.scaling --model gat --memory 4GB --vary depth --dataset D --out DIR``

Each try is a process of its own in which the cap is enforced; the largest that trains is found by
bisection. On CUDA the cap is on what torch's allocator takes: see :mod:`experiments.helpers.cap`.
"""

from __future__ import annotations

import argparse
import functools
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from datasets import load
from experiments.helpers.display import make_console, make_table, say
from experiments.helpers.errors import UsageError
from experiments.helpers.options import Parser
from experiments.helpers.origin import origin
from experiments.helpers.plot import require_matplotlib
from experiments.helpers.subjects import add_graph_flags, choose, exit_code, write_json
from experiments.helpers.summary import dataset_name
from experiments.helpers.trial import Specification, run_trial
from experiments.helpers.values import parse_bits, parse_device
from experiments.helpers.variants import VARIANTS

MODELS = ("gcn", "gcn-edge_index", "gat")

_STEPS = 2
"""Training steps of a try: from the second one on the optimizer has all of its memory."""

_PRECISION = 0.05
"""Where the bisection ends, as a share of what is found."""

_STRIDE = 16
"""How many times larger the next try is at most: what a small size takes tells little."""

_UNITS = {"MB": 10**6, "GB": 10**9, "MiB": 2**20, "GiB": 2**30}

_DIMENSIONS = ("depth", "width", "graph")


def largest(
    fits: Callable[[int], Any], start: int, guess: Callable[[list[tuple[int, Any]]], int]
) -> tuple[int, Any]:
    """The largest number that fits, to within 5 %, and what ``fits`` gave for it.

    By bisection, which is led to where ``guess`` expects the end: a try takes minutes.

    Args:
        fits: Gives something for a number that fits, None for one that does not.
        start: Where to begin, at least 1.
        guess: Says what may be the largest, from the numbers that fit so far, the largest last,
            each with what ``fits`` gave for it.

    Returns:
        0 and None if not even 1 fits.
    """
    fitted: list[tuple[int, Any]] = []
    low, high = 0, None
    failures, size = 0, start
    while high is None or high - low > max(1, int(low * _PRECISION)):
        found = fits(size)
        if found is None:
            high, failures = size, failures + 1
        else:
            low, failures = size, 0
            fitted.append((size, found))
        expected = guess(fitted) if fitted else 0
        if high is None:
            # Just above what fits, to find the end there; unless that has been passed already.
            least = low + max(1, int(low * _PRECISION)) if expected > 0.9 * low else 2 * low
            size = min(max(expected, least), _STRIDE * low)
            continue
        size = (low + high) // 2
        if failures == 1 and low:
            # What was expected was a little too much.
            size = max(size, int(high * 0.92))
        elif low < expected < high:
            size = expected
    return fitted[-1] if fitted else (0, None)


def expected_size(memory: int, fitted: list[tuple[int, dict[str, Any]]]) -> int:
    """The size that takes all of the memory, on the line through the last two sizes that fit.

    With one size alone, memory is taken to grow in proportion to it.
    """
    points = [(0, 0), *((size, found["peak_bytes"]) for size, found in fitted)]
    (less, before), (size, peak) = points[-2:]
    if peak <= before:
        # By chance, since a larger size takes more: in proportion, then.
        less, before = points[0]
    return int(size + (memory - peak) * (size - less) / max(1, peak - before))


def main(argv: list[str] | None = None) -> int:
    """Search and show; return the exit code as the main job does."""
    return exit_code("scaling", lambda: _run(argv))


def _run(argv: list[str] | None) -> None:
    args = _parse(argv)
    require_matplotlib()
    console = make_console()
    args.out.mkdir(parents=True, exist_ok=True)
    found: dict[str, dict[str, Any]] = {}
    for vary in args.vary:
        found[vary] = {}
        for variant in args.variants:
            fits = _fits(args, vary, variant, console)
            size, result = largest(
                fits, _START[vary], functools.partial(expected_size, args.memory)
            )
            found[vary][variant] = {
                "largest": size,
                "peak_bytes": result and result["peak_bytes"],
                "step_seconds": result and result["step_seconds"],
            } | (_graph_size(args, size) if vary == "graph" and size else {})
            say(console, f"{vary}, {variant}: {size}")
            # Each search takes minutes: one that is stopped leaves what it had.
            _write(found, args, argv)
    threads = torch.get_num_threads()
    _plot(found, f"{args.model}, {args.memory / 1e9:g} GB", args.out / "scaling.png")
    for vary, rows in found.items():
        console.print(make_table(f"Largest {vary}, {args.model}", HEAD, table(rows)))
    say(console, f"{args.dataset}, {threads} threads, {args.device}, cap {args.memory / 1e9:g} GB")


def _write(
    found: dict[str, dict[str, Any]], args: argparse.Namespace, argv: list[str] | None
) -> None:
    head = {name: getattr(args, name) for name in ("model", "bits", "memory")}
    head |= {"dataset": dataset_name(args.dataset), "device": str(args.device)}
    head |= {"threads": torch.get_num_threads()} | origin("scaling", argv)
    write_json(args.out / "scaling.json", head | {"largest": found})


HEAD = ("", "largest", "of stock", "nodes", "edges", "s/step", "throughput")


def table(rows: dict[str, dict[str, Any]]) -> list[tuple[str, ...]]:
    """Return the rows under :data:`HEAD`; throughput is size per second over that of stock."""
    stock = rows.get("stock", {})
    found: list[tuple[str, ...]] = []
    for name, row in rows.items():
        if not row["largest"]:
            found.append((name, "none fits", "", "", "", "", ""))
            continue
        of_stock = throughput = ""
        if stock.get("largest"):
            of_stock = f"{row['largest'] / stock['largest']:.1f}x"
            speeds = [r["largest"] / r["step_seconds"] for r in (row, stock)]
            throughput = f"{speeds[0] / speeds[1]:.2f}x"
        sizes = [f"{row[key]:,}" if key in row else "" for key in ("nodes", "edges")]
        found.append(
            (name, str(row["largest"]), of_stock, *sizes, f"{row['step_seconds']:.2f}", throughput)
        )
    return found


_START = {"depth": 4, "width": 64, "graph": 8}


def _fits(
    args: argparse.Namespace, vary: str, variant: str, console: Console
) -> Callable[[int], dict[str, Any] | None]:
    def fits(size: int) -> dict[str, Any] | None:
        dataset = _scaled(args.dataset, size) if vary == "graph" else args.dataset
        result = run_trial(
            Specification(
                args.model,
                variant,
                dataset,
                args.data_root,
                str(args.device),
                args.bits,
                _STEPS,
                hidden=size if vary == "width" else None,
                layers=size if vary == "depth" else None,
                cap_bytes=args.memory,
            )
        )
        say(console, f"  {variant}, {vary} {size}: {'does not fit' if result is None else 'fits'}")
        return result

    return fits


def _scaled(dataset: str, size: int) -> str:
    """The synthetic data set in hundredths of its published size."""
    return f"{dataset.split('@')[0]}@{size / 100:g}"


def _graph_size(args: argparse.Namespace, size: int) -> dict[str, int]:
    graph = load(_scaled(args.dataset, size), args.data_root)
    return {"nodes": graph.num_nodes, "edges": graph.num_edges}


def _plot(found: dict[str, dict[str, Any]], title: str, path: Path) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(4 * len(found), 3.5), layout="constrained")
    for i, (vary, rows) in enumerate(found.items()):
        axes = figure.add_subplot(1, len(found), i + 1)
        bars = axes.bar([*rows], [row["largest"] for row in rows.values()], color="#0072B2")
        axes.bar_label(bars, fontsize=8)
        axes.tick_params("x", rotation=45, labelsize=8)
        axes.set_title(f"largest {vary}: {title}", fontsize=9)
    figure.savefig(path, dpi=120)


def _parse(argv: list[str] | None) -> argparse.Namespace:
    parser = Parser(prog="python -m experiments.scaling", description=__doc__.splitlines()[0])
    add_graph_flags(parser)
    parser.add_argument("--model", choices=MODELS, default="gcn", help="default: gcn")
    parser.add_argument("--memory", type=_bytes, default="4GB", metavar="SIZE", help="default: 4GB")
    parser.add_argument(
        "--vary", default="depth,width", help=f"of {', '.join(_DIMENSIONS)} (default: depth,width)"
    )
    parser.add_argument("--variants", default="stock,checkpoint,L1,CB1,L1+blocks,CB2")
    parser.add_argument("--bits", type=parse_bits, default=4, metavar="B", help="default: 4")
    parser.add_argument("--out", type=Path, required=True, metavar="DIR", help="for the results")
    args = parser.parse_args(argv)
    args.variants = choose("--variants", args.variants, VARIANTS)
    args.vary = choose("--vary", args.vary, _DIMENSIONS)
    args.device = parse_device(args.device)
    if "graph" in args.vary and not args.dataset.startswith("synthetic:"):
        raise UsageError(
            f"Expected --dataset synthetic:NAME with --vary graph (got {args.dataset})"
        )
    return args


def _bytes(text: str) -> int:
    match = re.fullmatch(r"([0-9.]+)(MB|GB|MiB|GiB)", text)
    if match is None:
        raise argparse.ArgumentTypeError(f"Expected a size such as 4GB or 500MB (got {text!r})")
    return int(float(match[1]) * _UNITS[match[2]])


if __name__ == "__main__":
    sys.exit(main())
