"""The deepest or widest model, or the largest graph, that trains within a memory limit: Table 3.

``python -m experiments.scaling --model gat --memory 4GB --vary depth --dataset D --out DIR``

Each trial runs in a process of its own, in which the cap is enforced. Bisection finds the largest
size that trains. On CUDA the cap is on the memory that torch's allocator takes: see
:func:`experiments.helpers.process.set_cap`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from datasets import load
from experiments.helpers import command
from experiments.helpers.comparison import beside_stock, ratio, table
from experiments.helpers.errors import UsageError
from experiments.helpers.process import checked
from experiments.helpers.runner import run
from experiments.helpers.strategies import LABELS, STRATEGIES, Case
from experiments.helpers.tables import Table
from experiments.helpers.values import parse_memory

_STEPS = 2
"""Training steps of a trial: from the second one on, the optimizer has all of its memory."""

_PRECISION = 0.05
"""Interval at which the bisection ends, as a share of the size."""

_STRIDE = 16
"""The largest ratio of consecutive trials: the memory of a small size predicts little."""

_START = {"depth": 4, "width": 64, "graph": 8}
"""Sizes to begin with; those of a graph are hundredths of its published size."""


def largest(
    fits: Callable[[int], Any], start: int, guess: Callable[[list[tuple[int, Any]]], int]
) -> tuple[int, Any]:
    """Return the largest number that fits, to within 5 %, and the result of ``fits`` for it.

    The bisection tries the size that ``guess`` expects, because a trial takes minutes.

    Args:
        fits: Returns a result for a number that fits, else None.
        start: Where to begin, at least 1.
        guess: Returns the expected largest number from the numbers that fit so far, the largest
            last, each with the result of ``fits``.

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
            # Just above what fits, to find the end there, unless the guess is already passed.
            least = low + max(1, int(low * _PRECISION)) if expected > 0.9 * low else 2 * low
            size = min(max(expected, least), _STRIDE * low)
            continue
        size = (low + high) // 2
        if failures == 1 and low:
            # The expected size was a little too large.
            size = max(size, int(high * 0.92))
        elif low < expected < high:
            size = expected
    return fitted[-1] if fitted else (0, None)


def expected_size(memory: int, fitted: list[tuple[int, dict[str, Any]]]) -> int:
    """Return the size that takes all of the memory, by a line through the last two that fit.

    With only one size, memory is assumed to be proportional to the size.
    """
    points = [(0, 0), *((size, result["peak_bytes"]) for size, result in fitted)]
    (less, before), (size, peak) = points[-2:]
    if peak <= before:
        # A chance result, since a larger size takes more: assume proportion.
        less, before = points[0]
    return int(size + (memory - peak) * (size - less) / max(1, peak - before))


def by_size(results: dict[str, dict[str, Any]]) -> Table:
    """Return one row for each strategy, the smallest size first."""
    of_graphs = any("nodes" in result for result in results.values())
    sizes = (("nodes", "{nodes:,}"), ("edges", "{edges:,}"))
    spec = (
        ("", lambda row: LABELS[row["strategy"]]),
        *(sizes if of_graphs else (("largest", "{largest}"),)),
        ratio("relative", "largest", digits=1),
        ("s/step", "{step_seconds:,.2f}"),
        ratio("size per second, relative", "throughput"),
    )
    rows = {}
    for name, result in sorted(results.items(), key=lambda item: item[1]["largest"]):
        if result["largest"]:
            throughput = result["largest"] / result["step_seconds"]
            rows[name] = {**result, "throughput": throughput}
        else:
            rows[name] = {"reason": "none fits"}
    return table(spec, rows)


def by_memory(contents: Sequence[Mapping[str, Any]]) -> Table:
    """Return the largest graphs: one row for each memory, one column for each strategy."""
    contents = sorted(contents, key=lambda content: content["memory"])
    variants = [*contents[0]["largest"]["graph"]]

    def cells(content: Mapping[str, Any]) -> Iterator[str]:
        found = content["largest"]["graph"]
        yield f"{content['memory'] / 1e9:g} GB"
        for variant in variants:
            own, stock = found[variant], None if variant == "stock" else found["stock"]["largest"]
            yield beside_stock(own["largest"], stock, own.get("nodes"))

    return Table(["memory", *map(LABELS.__getitem__, variants)], [[*cells(c)] for c in contents])


def _search(args: command.Args, vary: str, variant: str) -> dict[str, Any]:
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
        result: dict[str, Any] | None = checked(run(case), f"a trial of {variant} failed")
        fit = "does not fit" if result is None else "fits"
        args.say(f"  {variant}, {vary} {size}: {fit}")
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
    """Return the synthetic data set at ``size`` hundredths of its published size."""
    return dataset if size is None else f"{dataset.split('@')[0]}@{size / 100:g}"


@command.main(
    *command.GRAPH,
    command.choice("--model", ("gcn", "gcn-edge_index", "gat", "gcnii"), "gcn"),
    command.flag("--memory", parse_memory, "4GB", metavar="SIZE"),
    command.names("--vary", _START, "depth,width"),
    command.names("--variants", STRATEGIES, "stock,checkpoint,lossless+blocks,L1+blocks"),
    command.BITS,
    command.OUT_NEEDED,
)
def main(args: command.Args) -> None:
    if "graph" in args.vary and not args.dataset.startswith("synthetic:"):
        raise UsageError(
            f"Expected --dataset synthetic:NAME with --vary graph (got {args.dataset})"
        )
    kept = args.keep("scaling.json", "model", "bits", "memory")
    for vary in args.vary:
        results = {}
        for variant in args.variants:
            place = ("largest", vary, variant)
            results[variant] = kept.once(place, _search, args, vary, variant)
            args.say(f"{vary}, {variant}: {results[variant]['largest']}")
        args.show(f"Largest {vary}, {args.model}", by_size(results))
    cap = f"cap {args.memory / 1e9:g} GB"
    args.say(f"{args.dataset}, {kept.content['threads']} threads, {args.device}, {cap}")


if __name__ == "__main__":
    raise SystemExit(main())
