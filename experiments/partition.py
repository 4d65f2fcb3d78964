"""One graph over several processes: what each takes and sends, and more parts by counting.

``python -m experiments.partition --model gat --dataset FILE.npz --parts 1,2,4 --out DIR`` trains a
few steps with each number of processes on this machine and tells the peak of a process, the bytes
it sends, the time of a step, and the loss beside that of one process. For more parts than can run
here it counts the rows that would be sent. What was measured is kept under ``--out``: the same
command goes on from there.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from pathlib import Path
from typing import Any

from datasets import load
from experiments.helpers.data import prepare
from experiments.helpers.display import make_console, make_table, say
from experiments.helpers.errors import ResultsError, UsageError
from experiments.helpers.folder import hold_folder
from experiments.helpers.options import Parser
from experiments.helpers.origin import origin
from experiments.helpers.parts import tables
from experiments.helpers.parts.counting import sizes
from experiments.helpers.parts.trial import CLOCK, WAYS, Specification, run_trial
from experiments.helpers.shares import PARTITIONS
from experiments.helpers.subjects import choose, exit_code, write_json
from experiments.helpers.summary import dataset_name
from experiments.helpers.values import parse_bits, parse_count

FILE_NAME = "partition.json"

MODELS = {
    **{"gat": "gat", "gcn": "gcn-edge_index", "gcnii": "gcnii-edge_index"},
    **{"gatv2": "gatv2", "transformer": "transformer"},
}
"""The names of :data:`SUBJECTS` for the models that run on a part."""


def main(argv: list[str] | None = None) -> int:
    """Measure and show; return the exit code as the main job does."""
    return exit_code("partition", lambda: _run(argv))


def _run(argv: list[str] | None) -> None:
    args = _parse(argv)
    console = make_console()
    settings = {name: getattr(args, name) for name in ("model", "bits", "steps", "cut")}
    settings |= {"hidden": args.hidden, "layers": args.layers, "threads": args.threads}
    settings |= {"dataset": dataset_name(args.dataset), "times": not args.no_times}
    with hold_folder(args.out, lambda text: say(console, text)):
        path = args.out / FILE_NAME
        found = _kept(path, settings)
        head = settings | {"halo_bits": args.halo_bits}
        for parts, way, halo_bits in _asked(args):
            key = {"parts": parts, "way": way, "halo_bits": halo_bits}
            if any(key.items() <= run.items() for run in found["runs"]):
                continue
            say(console, f"{parts} processes, {way}, {halo_bits} bits")
            ranks = run_trial(_specification(args, parts, way, halo_bits))
            if args.no_times:
                ranks = [{k: v for k, v in rank.items() if k not in CLOCK} for rank in ranks]
            found["runs"].append(key | {"ranks": ranks})
            # After each, so that the numbers so far survive.
            write_json(path, head | origin("partition", argv) | found)
        known = {size["parts"] for size in found["counted"]}
        missing = [parts for parts in args.count if parts not in known]
        if missing:
            task = prepare(load(args.dataset, args.data_root), "edge_index")
            for parts in missing:
                say(console, f"{parts} parts, counted")
                found["counted"].append(sizes(task.adjacency, len(task.x), args.cut, parts))
                write_json(path, head | origin("partition", argv) | found)
        content = head | found
    title = f"{args.model} on {settings['dataset']}, {args.steps} steps"
    console.print(make_table(title, tables.HEAD, tables.rows(content)))
    title = "more parts: counted bytes, times by a model of the network"
    console.print(make_table(title, tables.COUNTED_HEAD, tables.counted_rows(content)))


def _asked(args: argparse.Namespace) -> list[tuple[int, str, int]]:
    """Parts, ways and bits of the halo; one part sends nothing, and needs no bits for it."""
    return [
        (parts, way, bits)
        for parts in args.parts
        for way in args.ways
        for bits in (args.halo_bits if parts > 1 else [32])
    ]


def _specification(args: argparse.Namespace, parts: int, way: str, bits: int) -> Specification:
    return Specification(
        *(MODELS[args.model], way, args.dataset, args.data_root, parts, args.cut, bits),
        *(args.bits, args.steps, args.threads, args.hidden, args.layers),
    )


def _kept(path: Path, settings: dict[str, Any]) -> dict[str, list[dict[str, Any]]]:
    """What an earlier run left.

    Raises:
        ResultsError: If it is of other settings.
    """
    if not path.exists():
        return {"runs": [], "counted": []}
    content = json.loads(path.read_text(encoding="utf-8"))
    differing = [name for name, value in settings.items() if content.get(name) != value]
    if differing:
        raise ResultsError(
            f"Expected {path} to be of the same settings (got another {', '.join(differing)}): "
            "give another --out"
        )
    return {name: content[name] for name in ("runs", "counted")}


def _parse(argv: list[str] | None) -> argparse.Namespace:
    parser = Parser(prog="python -m experiments.partition", description=__doc__.splitlines()[0])
    parser.add_argument("--dataset", default="digits", metavar="D", help="default: digits")
    parser.add_argument("--data-root", default="data", metavar="DIR", help="default: data")
    parser.add_argument("--model", choices=tuple(MODELS), default="gat", help="default: gat")
    parser.add_argument(
        "--parts", default="1,2,4", metavar="P", help="processes to run (default: 1,2,4)"
    )
    parser.add_argument(
        "--count", default="8,16,32,64", metavar="P", help="parts to count (default: 8,16,32,64)"
    )
    parser.add_argument(
        "--ways",
        default="lossless+blocks,L1+blocks",
        help=f"of {', '.join(WAYS)} (default: lossless+blocks,L1+blocks)",
    )
    parser.add_argument(
        "--halo-bits", default="32,8", metavar="B", help="of rows that are sent (default: 32,8)"
    )
    parser.add_argument(
        "--cut", choices=PARTITIONS, default="metis", help="how to cut the graph (default: metis)"
    )
    parser.add_argument("--bits", type=parse_bits, default=4, metavar="B", help="default: 4")
    parser.add_argument("--steps", type=parse_count, default=4, metavar="N", help="default: 4")
    parser.add_argument("--hidden", type=parse_count, metavar="N", help="default: the model's")
    parser.add_argument("--layers", type=parse_count, metavar="N", help="default: the model's")
    parser.add_argument(
        "--threads", type=parse_count, default=1, metavar="T", help="of a process (default: 1)"
    )
    parser.add_argument(
        "--no-times",
        action="store_true",
        help="leave times by the clock out: the machine does other work",
    )
    parser.add_argument("--out", type=Path, required=True, metavar="DIR", help="for the results")
    args = parser.parse_args(argv)
    args.ways = choose("--ways", args.ways, WAYS)
    for name, parse in (("parts", parse_count), ("count", parse_count), ("halo_bits", parse_bits)):
        args.__dict__[name] = _numbers(name, getattr(args, name), parse)
    if max(args.parts) > 4 * (os.cpu_count() or 1):
        raise UsageError(
            f"Expected --parts of up to {4 * (os.cpu_count() or 1)} processes on this machine (got "
            f"{max(args.parts)}); --count counts what more would send"
        )
    return args


def _numbers(name: str, text: str, parse: Any) -> list[int]:
    try:
        return [parse(part) for part in dict.fromkeys(text.split(","))]
    except argparse.ArgumentTypeError as error:
        raise UsageError(f"--{name.replace('_', '-')}: {error}") from None


if __name__ == "__main__":
    sys.exit(main())
