"""How many bytes one training forward leaves for backward, at each level.

``python -m experiments.rates --dataset FILE.npz --models gat,gcn --bits 4,2 --details``

Each model is made anew for each level, with the same weights and the same dropout, runs one forward
and is gone before the next comes, so that memory holds the contexts of one of them only. The bytes
are those of :func:`gact_graph.report`.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

import gact_graph
from datasets import load
from experiments.data import NodeTask, prepare
from experiments.display import make_console, make_table, say
from experiments.errors import ExperimentError
from experiments.kernels import parse_widths
from experiments.options import Parser
from experiments.results import current_versions
from experiments.subjects import (
    SUBJECTS,
    Subject,
    add_graph_flags,
    choose,
    exit_code,
    label,
    make,
    wrap_at,
    write_json,
)
from experiments.values import parse_device
from gact_graph.report import Report

_STOCK = "L0"  # takes account, and changes nothing
_NAMED = 3  # slots that an error names


def main(argv: list[str] | None = None) -> int:
    """Count the bytes and print the table; return the exit code as the main job does."""
    return exit_code("rates", lambda: _run(argv))


def account(subject: Subject, task: NodeTask, level: str, bits: int) -> Report:
    """Return the account of one training forward at this level."""
    model = wrap_at(make(subject, task), level, bits).train()
    out = model(task.x, task.adjacency)
    report = gact_graph.report(model)
    del out  # and with it the graph and its contexts
    return report


def accounts(
    name: str, task: NodeTask, levels: Sequence[tuple[str, int]]
) -> dict[tuple[str, int], Report]:
    """Return the account of the subject ``name`` at each level with its bits.

    Raises:
        ExperimentError: If the raw bytes differ between levels: what stock autograd would hold does
            not depend on what is held instead.
    """
    reports = {pair: account(SUBJECTS[name], task, *pair) for pair in levels}
    check_raw_bytes(name, {label(*pair): report for pair, report in reports.items()})
    return reports


def check_raw_bytes(name: str, reports: Mapping[str, Report]) -> None:
    """Compare the raw bytes of the reports of one model, and slot by slot where they differ.

    Raises:
        ExperimentError: If they differ; the text tells where.
    """
    (first, expected), *others = reports.items()
    for other, found in others:
        if found.raw_bytes != expected.raw_bytes:
            here, there = _raw_by_slot(found), _raw_by_slot(expected)
            slots = [
                f"{slot} {here.get(slot, 0)} instead of {there.get(slot, 0)}"
                for slot in sorted(here.keys() | there.keys())
                if here.get(slot, 0) != there.get(slot, 0)
            ]
            more = f" and {len(slots) - _NAMED} more" if slots[_NAMED:] else ""
            raise ExperimentError(
                f"Expected the same raw bytes of {name} at every level (got {found.raw_bytes} at "
                f"{other} and {expected.raw_bytes} at {first}: {', '.join(slots[:_NAMED])}{more})"
            )


def _raw_by_slot(report: Report) -> dict[str, int]:
    found: dict[str, int] = {}
    for row in report.contexts:
        found[row.slot] = found.get(row.slot, 0) + row.raw_bytes
    return found


def _run(argv: list[str] | None) -> None:
    args = _parse(argv)
    levels = [(_STOCK, 32), ("lossless", 32), *(("L1", bits) for bits in args.bits)]
    graph = load(args.dataset, args.data_root)
    console = make_console()
    found = {}
    for name in args.models:
        task = prepare(graph, SUBJECTS[name].layout, device=args.device)
        found[name] = accounts(name, task, levels)
        if args.details:
            for pair, report in found[name].items():
                say(console, f"{name}, {'stock' if pair[0] == _STOCK else label(*pair)}")
                console.print(report)
    _show(console, found, levels[1:])
    say(console, f"{args.dataset}, saved for backward in one training forward, MB = 10^6 bytes")
    if args.out is not None:
        _write(found, args)


def _parse(argv: list[str] | None) -> argparse.Namespace:
    parser = Parser(prog="python -m experiments.rates", description=__doc__.splitlines()[0])
    add_graph_flags(parser)
    parser.add_argument(
        "--models", default="gat,gcn-edge_index,gcn,gcnii", help=f"of {', '.join(SUBJECTS)}"
    )
    parser.add_argument("--bits", type=parse_widths, default="4,2", help="of L1 (default: 4,2)")
    parser.add_argument("--details", action="store_true", help="also each report, slot by slot")
    parser.add_argument("--out", type=Path, metavar="FILE.json", help="keep all reports here")
    args = parser.parse_args(argv)
    args.models = choose("--models", args.models, SUBJECTS)
    args.device = parse_device(args.device)
    return args


def _show(
    console: Console,
    found: dict[str, dict[tuple[str, int], Report]],
    levels: Sequence[tuple[str, int]],
) -> None:
    head = ["model", "stock"]
    for pair in levels:
        head += [label(*pair), "rate"]
    rows = []
    for name, reports in found.items():
        row = [name, f"{reports[_STOCK, 32].raw_bytes / 1e6:.1f}"]
        for pair in levels:
            rate = reports[pair].rate
            row.append(f"{reports[pair].stored_bytes / 1e6:.1f}")
            row.append("-" if rate is None else f"{rate:.2f}x")
        rows.append(row)
    console.print(make_table("Saved for backward, MB", head, rows))


def _write(found: dict[str, dict[tuple[str, int], Report]], args: argparse.Namespace) -> None:
    models: dict[str, Any] = {
        name: {label(*pair): report.to_dict() for pair, report in reports.items()}
        for name, reports in found.items()
    }
    content = {
        "dataset": args.dataset,
        "bits": list(args.bits),
        "device": str(args.device),
        "versions": current_versions(),
        "models": models,
    }
    write_json(args.out, content)


if __name__ == "__main__":
    sys.exit(main())
