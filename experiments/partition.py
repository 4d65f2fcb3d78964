"""One graph over several processes: memory, bytes sent and time of each, and more parts by count.

``python -m experiments.partition --model gat --dataset FILE.npz --parts 1,2,4 --out DIR`` trains a
few steps with each number of processes on this machine and prints the peak of a process, the bytes
that it sends, the time of a step, and the loss beside that of one process. For more parts than can
run here it counts the rows that would be sent.
"""

from __future__ import annotations

import argparse
import functools
import os
import sys
from typing import Any

from datasets import load
from experiments.helpers import command
from experiments.helpers.case import Case
from experiments.helpers.data import prepare
from experiments.helpers.display import say, show
from experiments.helpers.errors import ExperimentError, UsageError
from experiments.helpers.parts import tables
from experiments.helpers.parts.counting import sizes
from experiments.helpers.runner import run_parts
from experiments.helpers.shares import PARTITIONS
from experiments.helpers.subjects import ON_EDGES
from experiments.helpers.values import parse_bits, parse_count

MODELS = ON_EDGES | {"gcnii": "gcnii-edge_index"}

WAYS = ("lossless", "L1", "lossless+blocks", "L1+blocks")

_BY_CLOCK = ("step_seconds", "exchange_seconds")
"""Times that depend on the other work of the machine."""


def _run(args: argparse.Namespace) -> None:
    most = 4 * (os.cpu_count() or 1)
    if max(args.parts) > most:
        raise UsageError(
            f"Expected --parts of up to {most} processes on this machine (got {max(args.parts)}); "
            "--count counts what more would send"
        )
    settings = ("model", "bits", "steps", "cut", "hidden", "layers", "threads")
    kept = command.keep(args, "partition.json", *settings, times=not args.no_times)
    kept.content |= {"halo_bits": args.halo_bits}
    for parts, way, bits in _asked(args):
        say(args.console, f"{parts} processes, {way}, {bits} bits")
        key = {"parts": parts, "way": way, "halo_bits": bits}
        kept.once(("runs", key), functools.partial(_train, args, parts, way, bits))
    for parts in args.count:
        say(args.console, f"{parts} parts, counted")
        kept.once(("counted", {"parts": parts}), functools.partial(_count, args, parts))
    title = f"{args.model} on {kept.content['dataset']}, {args.steps} steps"
    show(args.console, title, tables.HEAD, tables.rows(kept.content))
    title = "more parts: counted bytes, times by a model of the network"
    show(args.console, title, tables.COUNTED_HEAD, tables.counted_rows(kept.content))


def _asked(args: argparse.Namespace) -> list[tuple[int, str, int]]:
    """Parts, ways and bits of the halo; one part sends nothing, and needs no bits for it."""
    return [
        (parts, way, bits)
        for parts in args.parts
        for way in args.ways
        for bits in (args.halo_bits if parts > 1 else [32])
    ]


def _train(args: argparse.Namespace, parts: int, way: str, bits: int) -> dict[str, Any]:
    case = Case.of(args, model=MODELS[args.model], strategy=way, parts=parts, halo_bits=bits)
    ranks = run_parts(case, ("halo",))
    for rank in ranks:
        if "reason" in rank:
            raise ExperimentError(f"{way} in {parts} processes: {rank['reason']}")
    dropped = _BY_CLOCK if args.no_times else ()
    return {"ranks": [{k: v for k, v in rank.items() if k not in dropped} for rank in ranks]}


def _count(args: argparse.Namespace, parts: int) -> dict[str, Any]:
    task = _task(args.dataset, args.data_root)
    return sizes(task.adjacency, len(task.x), args.cut, parts)


@functools.lru_cache(1)
def _task(dataset: str, data_root: Any) -> Any:
    return prepare(load(dataset, data_root), "edge_index")


main = command.Command(
    "partition",
    __doc__,
    _run,
    command.DATASET,
    command.DATA_ROOT,
    command.flag("--model", default="gat", choices=tuple(MODELS)),
    command.several("--parts", parse_count, "1,2,4", "processes to run"),
    command.several("--count", parse_count, "8,16,32,64", "parts to count"),
    command.names("--ways", WAYS, "lossless+blocks,L1+blocks"),
    command.several("--halo-bits", parse_bits, "32,8", "of rows that are sent"),
    command.flag("--cut", default="metis", choices=PARTITIONS),
    command.BITS,
    command.number("--steps", 4),
    *command.SIZES,
    command.number("--threads", 1, "of a process"),
    command.switch("--no-times", "leave times by the clock out: the machine does other work"),
    command.OUT_NEEDED,
)

if __name__ == "__main__":
    sys.exit(main())
