"""Times of the kernels, beside copies of the same tensor and beside plain torch.

``python -m experiments.kernels --elements 43_400_000 --bits 1-8 --rounds 7 --threads 2``
``python -m experiments.kernels --device cuda --bits 1-8,16``

Packing and unpacking a tensor in each width; with ``--nodes``, on CUDA by default, also sums over
edges and attention weights of a random graph. All run in turn after one warm-up, and medians are
compared: see :mod:`experiments.helpers.kernel_jobs`. With the default of 1 GiB on CUDA no job finds
its input in the cache.
"""

from __future__ import annotations

import argparse
from typing import Any

import torch

from experiments.helpers import command
from experiments.helpers.errors import UsageError
from experiments.helpers.kept import write_json
from experiments.helpers.kernel_jobs import (
    GROUP_SIZE,
    edge_jobs,
    launches,
    measure,
    quantizer_jobs,
)
from experiments.helpers.origin import gpus
from experiments.helpers.values import parse_count, parse_device, parse_seeds
from gact_graph.info import facts
from gact_graph.ops import cpu
from gact_graph.ops.quantize import DTYPES

_ELEMENTS = 43_400_000  # a float32 node tensor of some 170 MB: 169,343 nodes, 256 channels
_BYTES_ON_CUDA = 1 << 30
_NODES_ON_CUDA = 200_000
_MOST_BITS = 16
_DTYPES = {str(dtype).removeprefix("torch."): dtype for dtype in DTYPES}

HEAD = (
    *("bits", "pack, ms", "GB/s", "pack / copy", "unpack, ms", "GB/s", "unpack / copy"),
    "unpack / clone",
)

EDGES_HEAD = ("job", "ms", "GB/s", "plain torch, ms", "times as fast")


def rows(jobs: dict[str, Any]) -> list[tuple[str, ...]]:
    """Return a row for each width, under :data:`HEAD`."""
    median = {name: job["median_milliseconds"] for name, job in jobs.items()}
    results = []
    for bits in (name.split()[1] for name in jobs if name.startswith("pack")):
        cells = [bits]
        for name in (f"pack {bits}", f"unpack {bits}"):
            cells += [f"{median[name]:.3f}", f"{jobs[name]['gb_per_s']:,.1f}"]
            cells.append(f"{median[name] / median['copy']:.2f}")
        results.append((*cells, f"{median[f'unpack {bits}'] / median['clone']:.2f}"))
    return results


def edge_rows(jobs: dict[str, Any]) -> list[tuple[str, ...]]:
    """Return a row for each kernel, under :data:`EDGES_HEAD`."""
    results: list[tuple[str, ...]] = []
    for name, job in jobs.items():
        if f"plain {name}" in jobs:
            ours, plain = (each["median_milliseconds"] for each in (job, jobs[f"plain {name}"]))
            speed = f"{job['gb_per_s']:,.1f}"
            results.append((name, f"{ours:.3f}", speed, f"{plain:.3f}", f"{plain / ours:.1f}"))
    return results


def parse_widths(text: str) -> tuple[int, ...]:
    """Read widths of 1 to 16: ``4``, ``1-8`` or ``2,4,8``."""
    widths = parse_seeds(text)
    if not all(1 <= bits <= _MOST_BITS for bits in widths):
        raise argparse.ArgumentTypeError(f"Expected widths of 1 to {_MOST_BITS} (got {text!r})")
    return widths


def _measure(
    args: command.Args, elements: int, nodes: int | None, dtype: torch.dtype
) -> dict[str, Any]:
    device = args.device
    jobs = quantizer_jobs(elements, args.bits, dtype, device)
    results: dict[str, Any] = {"jobs": measure(jobs, args.rounds, device)}
    del jobs
    if device.type == "cuda":
        results["launch_microseconds"] = launches(device, dtype, args.rounds)
    if nodes is not None:
        edges = edge_jobs(nodes, device)
        results["edges"] = {"nodes": nodes, "jobs": measure(edges, args.rounds, device)}
    return results


def _served_on_cpu() -> str:
    if cpu.load() is None:
        return "pure torch"
    return f"kernels built for {torch.backends.cpu.get_cpu_capability()}"


def _long_count(text: str) -> int:
    """Read a whole number of at least 1 that may hold underscores between digits."""
    return parse_count(text.replace("_", ""))


@command.main(
    command.flag("--elements", _long_count, text=f"default: {_ELEMENTS:_}; on CUDA 1 GiB"),
    command.flag("--bits", parse_widths, "1-8"),
    command.choice("--dtype", _DTYPES, "float32"),
    command.flag("--device", parse_device, "cpu"),
    command.number("--rounds", 7),
    command.flag("--nodes", _long_count, text=f"of a graph; default: on CUDA {_NODES_ON_CUDA:_}"),
    command.number("--threads", 2, "on the CPU"),
    command.OUT_FILE,
)
def main(args: command.Args) -> None:
    dtype, on_cuda = _DTYPES[args.dtype], args.device.type == "cuda"
    if max(args.bits) >= 8 * dtype.itemsize:
        raise UsageError(
            f"Expected --bits below the {8 * dtype.itemsize} of {args.dtype}, at which it is kept "
            f"unchanged (got {max(args.bits)})"
        )
    usual = _BYTES_ON_CUDA // dtype.itemsize if on_cuda else _ELEMENTS
    elements, nodes = args.elements or usual, args.nodes or (_NODES_ON_CUDA if on_cuda else None)
    before = torch.get_num_threads()
    torch.set_num_threads(args.threads)
    try:
        results = _measure(args, elements, nodes, dtype)
    finally:
        torch.set_num_threads(before)
    served = facts()["CUDA kernels"] if on_cuda else _served_on_cpu()
    about = {"elements": elements, "bits": args.bits, "group_size": GROUP_SIZE, "kernels": served}
    about |= {name: getattr(args, name) for name in ("dtype", "rounds", "threads")}
    about |= {"device": str(args.device), "gpus": gpus()} | args.origin
    if args.out is not None:
        write_json(args.out, about | results)
    args.show(f"Quantizer on {args.device}, medians", HEAD, rows(results["jobs"]))
    copy, clone = (results["jobs"][name] for name in ("copy", "clone"))
    args.say(
        f"copy {copy['median_milliseconds']:.1f} ms, {copy['gb_per_s']:,.0f} GB/s; clone "
        f"{clone['median_milliseconds']:.1f} ms; bytes are read plus written",
    )
    if "launch_microseconds" in results:
        launch = results["launch_microseconds"]
        args.say(
            f"a small pack from Python takes the host {launch['pack']:.1f} us, a small copy "
            f"{launch['copy']:.1f} us",
        )
    if nodes is not None:
        title = f"Edges on {args.device}, {nodes:,} nodes, medians"
        args.show(title, EDGES_HEAD, edge_rows(results["edges"]["jobs"]))
    args.say(
        f"{elements:,} {args.dtype}, {args.rounds} rounds in turn, {args.threads} threads, "
        f"{served}",
    )


if __name__ == "__main__":
    raise SystemExit(main())
