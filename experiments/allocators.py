"""Time and peak of a training step under each CPU allocator.

``python -m experiments.allocators --dataset FILE.npz --models gat,gcn --out FILE.json`` takes a few
steps of each way in processes of their own, one allocator after the other in each round: the memory
that gact_graph keeps, jemalloc preloaded, told to keep what is freed or with its defaults, and
glibc's malloc alone.
"""

from __future__ import annotations

import argparse
import itertools
import sys
from pathlib import Path
from typing import Any

import torch

from experiments.helpers.display import make_console, make_table, say
from experiments.helpers.errors import ExperimentError
from experiments.helpers.labels import LAYERS
from experiments.helpers.options import Parser
from experiments.helpers.origin import origin
from experiments.helpers.peers import comparison
from experiments.helpers.peers.allocators import ALLOCATORS
from experiments.helpers.peers.trial import Specification, run_trial
from experiments.helpers.peers.ways import MODELS, WAYS
from experiments.helpers.subjects import choose, exit_code, write_json
from experiments.helpers.summary import dataset_name
from experiments.helpers.values import parse_count

HEAD = ("", "", *ALLOCATORS.values())


def main(argv: list[str] | None = None) -> int:
    """Measure and show; return the exit code as the main job does."""
    return exit_code("allocators", lambda: _run(argv))


def rows(found: dict[str, dict[str, dict[str, dict[str, float]]]]) -> list[tuple[str, ...]]:
    """Return a row for each model and way: seconds of a step and peak memory by allocator."""
    return [
        (
            LAYERS[MODELS[model]],
            WAYS[way].label,
            *(
                f"{one['step_seconds']:.2f} s, {one['peak_bytes'] / 1e6:,.0f} MB"
                for one in by_allocator.values()
            ),
        )
        for model, ways in found.items()
        for way, by_allocator in ways.items()
    ]


def _run(argv: list[str] | None) -> None:
    args = _parse(argv)
    console = make_console()
    measured: dict[str, Any] = {}
    tasks = itertools.product(range(args.rounds), args.models, args.variants, ALLOCATORS)
    for number, model, way, allocator in tasks:
        say(console, f"round {number + 1}, {model}, {way}, {allocator}")
        found = run_trial(
            Specification(*(model, way, args.dataset), steps=args.steps, allocator=allocator)
        )
        if "reason" in found:
            raise ExperimentError(f"{model}, {way}, {allocator}: {found['reason']}")
        ways = measured.setdefault(model, {}).setdefault(way, {})
        ways.setdefault(allocator, []).append(found)
    medians = {
        model: {
            way: {allocator: comparison.medians(several) for allocator, several in found.items()}
            for way, found in ways.items()
        }
        for model, ways in measured.items()
    }
    console.print(
        make_table(f"{dataset_name(args.dataset)}, {args.steps} steps", HEAD, rows(medians))
    )
    if args.out is not None:
        about = {"dataset": dataset_name(args.dataset), "steps": args.steps}
        about |= {"threads": torch.get_num_threads()}
        write_json(
            args.out, about | origin("allocators", argv) | {"medians": medians, "rounds": measured}
        )


def _parse(argv: list[str] | None) -> argparse.Namespace:
    parser = Parser(prog="python -m experiments.allocators", description=__doc__.splitlines()[0])
    parser.add_argument("--dataset", default="digits", metavar="D", help="default: digits")
    parser.add_argument("--models", default="gat,gcn", help=f"of {', '.join(MODELS)}")
    parser.add_argument(
        "--variants", default="stock-kept,lossless+blocks,L1-4+blocks", help=f"of {', '.join(WAYS)}"
    )
    parser.add_argument("--rounds", type=parse_count, default=3, metavar="R", help="default: 3")
    parser.add_argument(
        "--steps", type=parse_count, default=8, metavar="N", help="of each round (default: 8)"
    )
    parser.add_argument("--out", type=Path, metavar="FILE.json", help="keep the numbers here")
    args = parser.parse_args(argv)
    args.models = choose("--models", args.models, tuple(MODELS))
    args.variants = choose("--variants", args.variants, WAYS)
    return args


if __name__ == "__main__":
    sys.exit(main())
