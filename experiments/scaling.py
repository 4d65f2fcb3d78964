"""The deepest or widest model, or the largest graph, that trains within a memory: Table 3.

``python -m experiments.scaling --model gat --memory 4GB --vary depth --dataset D --out DIR``

Each try is a process of its own in which the cap is enforced; the largest that trains is found by
bisection. On CUDA the cap is on the memory that torch's allocator takes: see
:mod:`experiments.helpers.cap`.
"""

from __future__ import annotations

import argparse
import functools
import re
import sys
from collections.abc import Callable
from typing import Any

from datasets import load
from experiments.helpers import command
from experiments.helpers.case import Case
from experiments.helpers.comparison import Row, amount, ratio, table
from experiments.helpers.display import say, show
from experiments.helpers.errors import UsageError
from experiments.helpers.process import checked
from experiments.helpers.runner import run
from experiments.helpers.strategies import STRATEGIES

_STEPS = 2
"""Training steps of a try: from the second one on the optimizer has all of its memory."""

_PRECISION = 0.05
"""Where the bisection ends, as a share of the size."""

_STRIDE = 16
"""The largest ratio of one try to the last: the memory of a small size says little."""

_UNITS = {"MB": 10**6, "GB": 10**9, "MiB": 2**20, "GiB": 2**30}

_START = {"depth": 4, "width": 64, "graph": 8}
"""Sizes to begin with; those of a graph are hundredths of its published size."""


def largest(
    fits: Callable[[int], Any], start: int, guess: Callable[[list[tuple[int, Any]]], int]
) -> tuple[int, Any]:
    """Return the largest number that fits, to within 5 %, and the result of ``fits`` for it.

    A bisection that goes to where ``guess`` expects the end: a try takes minutes.

    Args:
        fits: Gives something for a number that fits, None for one that does not.
        start: Where to begin, at least 1.
        guess: Says what may be the largest, from the numbers that fit so far, the largest last,
            each with the result of ``fits``.

    Returns:
        0 and None if not even 1 fits.
    """
    fitted: list[tuple[int, Any]] = []
    low, high = 0, None
    failures, size = 0, start
    while high is None or high - low > max(1, int(low * _PRECISION)):
        result = fits(size)
        if result is None:
            high, failures = size, failures + 1
        else:
            low, failures = size, 0
            fitted.append((size, result))
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
    """Return the size that takes all of the memory, by a line through the last two that fit.

    With one size alone, memory is taken to grow in proportion to it.
    """
    points = [(0, 0), *((size, result["peak_bytes"]) for size, result in fitted)]
    (less, before), (size, peak) = points[-2:]
    if peak <= before:
        # By chance, since a larger size takes more: in proportion, then.
        less, before = points[0]
    return int(size + (memory - peak) * (size - less) / max(1, peak - before))


def _throughput(row: Row, stock: Row) -> str:
    """Size a second, over that of stock."""
    if not stock.get("largest"):
        return ""
    mine, theirs = (each["largest"] / each["step_seconds"] for each in (row, stock))
    return f"{mine / theirs:.2f}x"


_COLUMNS = (
    ("largest", lambda row, stock: str(row["largest"])),
    ratio("of stock", "largest", digits=1),
    amount("nodes", "nodes", digits=0),
    amount("edges", "edges", digits=0),
    amount("s/step", "step_seconds"),
    ("throughput", _throughput),
)


def _run(args: argparse.Namespace) -> None:
    if "graph" in args.vary and not args.dataset.startswith("synthetic:"):
        raise UsageError(
            f"Expected --dataset synthetic:NAME with --vary graph (got {args.dataset})"
        )
    kept = command.keep(args, "scaling.json", "model", "bits", "memory")
    for vary in args.vary:
        results = {}
        for variant in args.variants:
            search = functools.partial(_search, args, vary, variant)
            results[variant] = kept.once(("largest", vary, variant), search)
            say(args.console, f"{vary}, {variant}: {results[variant]['largest']}")
        rows = {n: r if r["largest"] else {"reason": "none fits"} for n, r in results.items()}
        show(args.console, f"Largest {vary}, {args.model}", *table(_COLUMNS, rows))
    cap = f"cap {args.memory / 1e9:g} GB"
    say(args.console, f"{args.dataset}, {kept.content['threads']} threads, {args.device}, {cap}")


def _search(args: argparse.Namespace, vary: str, variant: str) -> dict[str, Any]:
    def fits(size: int) -> dict[str, Any] | None:
        case = Case.of(
            args,
            strategy=variant,
            dataset=_scaled(args.dataset, size if vary == "graph" else None),
            steps=_STEPS,
            hidden=size if vary == "width" else None,
            layers=size if vary == "depth" else None,
            cap_bytes=args.memory,
        )
        result: dict[str, Any] | None = checked(run(case, ()), f"a trial of {variant} failed")
        fit = "does not fit" if result is None else "fits"
        say(args.console, f"  {variant}, {vary} {size}: {fit}")
        return result

    guess = functools.partial(expected_size, args.memory)
    size, result = largest(fits, _START[vary], guess)
    results = {"largest": size}
    for name in ("peak_bytes", "step_seconds"):
        results[name] = result and result[name]
    if vary == "graph" and size:
        graph = load(_scaled(args.dataset, size), args.data_root)
        results |= {"nodes": graph.num_nodes, "edges": graph.num_edges}
    return results


def _scaled(dataset: str, size: int | None) -> str:
    """The synthetic data set in hundredths of its published size."""
    return dataset if size is None else f"{dataset.split('@')[0]}@{size / 100:g}"


def _bytes(text: str) -> int:
    match = re.fullmatch(r"([0-9.]+)(MB|GB|MiB|GiB)", text)
    if match is None:
        raise argparse.ArgumentTypeError(f"Expected a size such as 4GB or 500MB (got {text!r})")
    return int(float(match[1]) * _UNITS[match[2]])


main = command.Command(
    "scaling",
    __doc__,
    _run,
    *command.GRAPH,
    command.flag("--model", default="gcn", choices=("gcn", "gcn-edge_index", "gat")),
    command.flag("--memory", _bytes, "4GB", metavar="SIZE"),
    command.names("--vary", _START, "depth,width"),
    command.names("--variants", STRATEGIES, "stock,checkpoint,L1,CB1,L1+blocks,CB2"),
    command.BITS,
    command.OUT_NEEDED,
)

if __name__ == "__main__":
    sys.exit(main())
