"""How long the kernels take to pack and unpack a tensor, beside copies of it.

``python -m experiments.kernels --elements 43_400_000 --bits 1-8 --rounds 7 --threads 2``
``python -m experiments.kernels --device cuda --bits 1-8,16``

``copy`` is ``dst.copy_(src)`` into memory that is there already, ``clone`` is ``src.clone()``,
which has to fetch its memory from the system as unpack has to. All are run in turn, so that they
meet the same weather of a busy machine, after one warm-up; the medians are compared. What is
measured on CUDA is told in :mod:`experiments.helpers.kernels_cuda`, and of the kernels for edges in
:mod:`experiments.helpers.kernels_edges`.
"""

from __future__ import annotations

import argparse
import functools
import json
import statistics
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from experiments.helpers import kernels_cuda, kernels_edges
from experiments.helpers.atomic import write_atomically
from experiments.helpers.display import make_console, make_table, say
from experiments.helpers.errors import ExperimentError, UsageError
from experiments.helpers.options import Parser
from experiments.helpers.results import current_versions
from experiments.helpers.timing import time_in_turn
from experiments.helpers.values import parse_count, parse_device
from gact_graph.ops import cpu
from gact_graph.ops.quantize import DTYPES, pack

_ELEMENTS = 43_400_000  # a float32 node tensor of some 170 MB: 169,343 nodes, 256 channels
_MOST_BITS = 16
_DTYPES = {str(dtype).removeprefix("torch."): dtype for dtype in DTYPES}


def main(argv: list[str] | None = None) -> int:
    """Time the kernels and print the table; return the exit code as the main job does."""
    try:
        args = _parse(argv)
        content = (_on_cuda if args.device.type == "cuda" else _on_cpu)(args)
        if args.out is not None:
            write_atomically(args.out, (json.dumps(content, indent=1) + "\n").encode())
    except ExperimentError as error:
        print(f"kernels: {error}", file=sys.stderr)
        return error.exit_code
    return 0


def measure(
    elements: int, widths: tuple[int, ...], rounds: int, dtype: torch.dtype = torch.float32
) -> dict[str, list[float]]:
    """Return milliseconds of every round of ``copy``, ``clone``, ``pack b`` and ``unpack b``."""
    source = torch.randn(elements, generator=torch.Generator().manual_seed(0)).to(dtype)
    target = torch.empty_like(source)
    jobs: dict[str, Callable[[], Any]] = {
        "copy": lambda: target.copy_(source),
        "clone": source.clone,
    }
    for bits in widths:
        record = pack(source, bits)
        jobs[f"pack {bits}"] = functools.partial(pack, source, bits)
        jobs[f"unpack {bits}"] = record.unpack
    seconds = time_in_turn(jobs, rounds)
    return {name: [1e3 * second for second in times] for name, times in seconds.items()}


def parse_widths(text: str) -> tuple[int, ...]:
    """Read widths of 1 to 16: ``4``, ``1-8`` or ``2,4,8``."""
    widths: list[int] = []
    for part in text.split(","):
        first, dash, last = part.partition("-")
        ends = (first, last if dash else first)
        if not all(end.isascii() and end.isdecimal() for end in ends):
            raise argparse.ArgumentTypeError(
                f"Expected widths as '1-8', '2,4' or '2' (got {text!r})"
            )
        low, high = (int(end) for end in ends)
        if not 1 <= low <= high <= _MOST_BITS:
            raise argparse.ArgumentTypeError(
                f"Expected widths from low to high, 1 to {_MOST_BITS} (got {text!r})"
            )
        widths.extend(range(low, high + 1))
    return tuple(dict.fromkeys(widths))


def _on_cpu(args: argparse.Namespace) -> dict[str, Any]:
    before = torch.get_num_threads()
    torch.set_num_threads(args.threads)
    try:
        milliseconds = measure(args.elements, args.bits, args.rounds, _DTYPES[args.dtype])
    finally:
        torch.set_num_threads(before)
    _show(make_console(), milliseconds, args)
    return _content(milliseconds, args)


def _on_cuda(args: argparse.Namespace) -> dict[str, Any]:
    found = kernels_cuda.measure(
        args.elements, args.bits, args.rounds, _DTYPES[args.dtype], args.device
    )
    about = kernels_cuda.run_state()
    console = make_console()
    rows = kernels_cuda.table(found, args.bits)
    console.print(make_table("Quantizer on CUDA, medians", kernels_cuda.HEAD, rows))
    for line in kernels_cuda.notes(found):
        say(console, line)
    say(console, f"{args.elements:,} {args.dtype}, {args.rounds} rounds in turn")
    say(console, about["kernels"])
    edges = kernels_edges.measure(args.nodes, args.rounds, args.device)
    rows = kernels_edges.table(edges)
    console.print(make_table("Edges on CUDA, medians", kernels_edges.HEAD, rows))
    say(
        console,
        "{nodes:,} nodes, {edges:,} edges, {heads} heads, {channels} channels".format(**edges),
    )
    head = {name: getattr(args, name) for name in ("elements", "dtype", "rounds")}
    return (
        head
        | {"bits": list(args.bits), "device": str(args.device)}
        | about
        | found
        | {"edges": edges}
    )


def _parse(argv: list[str] | None) -> argparse.Namespace:
    parser = Parser(prog="python -m experiments.kernels", description=__doc__.splitlines()[0])
    elements = (
        f"default: {_ELEMENTS:_}; on CUDA 1 GiB, and much less would be measured in the cache"
    )
    parser.add_argument("--elements", type=_parse_long_count, help=elements)
    parser.add_argument("--bits", type=parse_widths, default="1-8", help="default: 1-8")
    parser.add_argument(
        "--dtype", choices=tuple(_DTYPES), default="float32", help="default: float32"
    )
    parser.add_argument("--device", default="cpu", help="cpu, cuda or cuda:N (default: cpu)")
    parser.add_argument("--rounds", type=parse_count, default=7, metavar="R", help="default: 7")
    nodes = f"of the graph for sums over edges, on CUDA (default: {kernels_edges.DEFAULT_NODES:_})"
    parser.add_argument(
        "--nodes", type=_parse_long_count, default=kernels_edges.DEFAULT_NODES, help=nodes
    )
    threads = "on the CPU (default: 2)"
    parser.add_argument("--threads", type=parse_count, default=2, metavar="T", help=threads)
    parser.add_argument("--out", type=Path, metavar="FILE.json", help="keep all times here")
    args = parser.parse_args(argv)
    args.device = parse_device(args.device)
    itemsize = _DTYPES[args.dtype].itemsize
    if max(args.bits) >= 8 * itemsize:
        raise UsageError(
            f"Expected --bits below the {8 * itemsize} of {args.dtype}, which is kept as it is at "
            f"its own width (got {max(args.bits)})"
        )
    if args.elements is None:
        on_cuda = kernels_cuda.DEFAULT_BYTES // itemsize
        args.elements = on_cuda if args.device.type == "cuda" else _ELEMENTS
    return args


def _parse_long_count(text: str) -> int:
    """Read a whole number of at least 1 that may hold underscores between digits."""
    return parse_count(text.replace("_", ""))


def _medians(milliseconds: dict[str, list[float]]) -> dict[str, float]:
    return {name: statistics.median(times) for name, times in milliseconds.items()}


def _show(console: Console, milliseconds: dict[str, list[float]], args: argparse.Namespace) -> None:
    median = _medians(milliseconds)
    copy, clone = median["copy"], median["clone"]
    rows = []
    for bits in args.bits:
        pack_ms, unpack_ms = median[f"pack {bits}"], median[f"unpack {bits}"]
        rows.append(
            (
                str(bits),
                f"{pack_ms:.1f}",
                f"{pack_ms / copy:.2f}",
                f"{unpack_ms:.1f}",
                f"{unpack_ms / clone:.2f}",
            )
        )
    head = ("bits", "pack, ms", "pack / copy", "unpack, ms", "unpack / clone")
    console.print(make_table("Quantizer on the CPU, medians", head, rows))
    say(console, f"copy {copy:.1f} ms, clone {clone:.1f} ms")
    say(
        console,
        f"{args.elements:,} {args.dtype}, {args.rounds} rounds in turn, {args.threads} threads, "
        f"{_served_by()}",
    )


def _served_by() -> str:
    if cpu.load() is None:
        return "pure torch"
    return f"kernels built for {torch.backends.cpu.get_cpu_capability()}"


def _content(milliseconds: dict[str, list[float]], args: argparse.Namespace) -> dict[str, Any]:
    median = _medians(milliseconds)
    return {
        "elements": args.elements,
        "dtype": args.dtype,
        "bits": list(args.bits),
        "rounds": args.rounds,
        "threads": args.threads,
        "kernels": _served_by(),
        "versions": current_versions(),
        "milliseconds": milliseconds,
        "median_milliseconds": median,
        "pack_over_copy": {str(b): median[f"pack {b}"] / median["copy"] for b in args.bits},
        "unpack_over_clone": {str(b): median[f"unpack {b}"] / median["clone"] for b in args.bits},
    }


if __name__ == "__main__":
    sys.exit(main())
