"""Times of the kernels, beside copies of the same tensor and beside plain torch.

``python -m experiments.kernels --elements 43_400_000 --bits 1-8 --rounds 7 --threads 2``
``python -m experiments.kernels --device cuda --bits 1-8,16``

The jobs are packing and unpacking of a tensor in each width; with ``--nodes``, on CUDA by default,
also sums over edges and attention weights of a random graph, in which all nodes have equally many
edges and the sources are random. All jobs run in turn after one warm-up, and medians are compared.
Bytes are counted, read plus written; rows of sources are read once per edge. With the default of
1 GiB on CUDA, no job finds its input in the cache.
"""

from __future__ import annotations

import argparse
import functools
import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from experiments.helpers import command
from experiments.helpers.errors import UsageError
from experiments.helpers.kept import write_json
from experiments.helpers.origin import gpus
from experiments.helpers.tables import Table, table
from experiments.helpers.timing import launch_seconds, time_on
from experiments.helpers.values import parse_count, parse_device, parse_seeds
from gact_graph.api.report.names import counted
from gact_graph.info import facts
from gact_graph.ops import attention, cpu, dot_attention, leaky_attention, weighted_sum
from gact_graph.ops.quantize import DTYPES, pack
from gact_graph.ops.reference import attention as attention_reference
from gact_graph.ops.reference import dot_attention as dot_reference
from gact_graph.ops.reference import leaky_attention as leaky_reference
from gact_graph.ops.reference import weighted_sum as weighted_reference

GROUP_SIZE = 256

_ELEMENTS = 43_400_000  # a float32 node tensor of some 170 MB: 169,343 nodes, 256 channels
_BYTES_ON_CUDA = 1 << 30
_NODES_ON_CUDA = 200_000
_MOST_BITS = 16
_DTYPES = {str(dtype).removeprefix("torch."): dtype for dtype in DTYPES}

_LAUNCH_ELEMENTS, _LAUNCH_BITS = 4096, 4
_LAUNCHES = 200  # fewer than a device queues before the host has to wait

_DEGREE, _HEADS, _CHANNELS = 16, 3, 64
_SETTINGS = 0.2, 0.1, 1  # slope, dropout, seed
_INDEX = 4  # bytes of a place

_EDGES = (
    ("job", "{job}"),
    ("ms", "{ours[median_milliseconds]:.3f}"),
    ("GB/s", "{ours[gb_per_s]:,.1f}"),
    ("plain torch, ms", "{plain[median_milliseconds]:.3f}"),
    ("times as fast", "{speedup:.1f}"),
)


class Job(NamedTuple):
    """A function and the bytes that it moves."""

    run: Callable[[], Any]
    moved: int


def quantizer_jobs(
    elements: int, widths: Sequence[int], dtype: torch.dtype, device: torch.device
) -> dict[str, Job]:
    """Return the jobs ``copy`` (into existing memory), ``clone`` (into fresh memory, like unpack),
    and ``pack b`` and ``unpack b`` of each width b."""
    generator = torch.Generator(device).manual_seed(0)
    source = torch.randn(elements, generator=generator, device=device).to(dtype)
    target = torch.empty_like(source)
    jobs = {
        "copy": Job(lambda: target.copy_(source), 2 * source.nbytes),
        "clone": Job(source.clone, 2 * source.nbytes),
    }
    for bits in widths:
        packing = functools.partial(pack, source, bits, group_size=GROUP_SIZE)
        packed = packing()
        moved = source.nbytes + packed.nbytes
        jobs[f"pack {bits}"] = Job(packing, moved)
        jobs[f"unpack {bits}"] = Job(packed.unpack, moved)
    return jobs


def edge_jobs(nodes: int, device: torch.device) -> dict[str, Job]:
    """Return the jobs of sums over edges and of attention weights, each also in ``plain`` torch,
    for ``nodes`` nodes with 16 edges each, 3 heads and 64 channels."""
    generator = torch.Generator(device).manual_seed(0)
    edges, width = nodes * _DEGREE, _HEADS * _CHANNELS

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, device=device)

    places = torch.randint(nodes, (edges,), generator=generator, device=device).int()
    positions = torch.arange(edges, device=device, dtype=torch.int32)
    starts = torch.arange(nodes + 1, device=device) * _DEGREE
    x, other = normal(nodes, width), normal(nodes, width)
    weight = normal(edges, _HEADS)
    scores, of_scores, att = normal(nodes, _HEADS), normal(nodes, _HEADS), normal(_HEADS, _CHANNELS)
    out, of_edges = torch.empty_like(x), torch.empty_like(weight)
    graph = (places, None, starts)
    rows, gathered = x.nbytes, edges * width * x.element_size()
    numbers = edges * (_INDEX + _HEADS * x.element_size())
    kinds: dict[str, tuple[Any, Any, str, tuple[Any, ...], int]] = {
        "sum": (
            *(weighted_sum, weighted_reference, "weighted_sum"),
            (out, x, places, weight, None, starts),
            gathered + numbers + rows,
        ),
        "sum, backward": (
            *(weighted_sum, weighted_reference, "weighted_sum_backward"),
            (out, of_edges, other, x, places, weight, positions, starts),
            gathered + 2 * numbers + 2 * rows,
        ),
        "GAT's weights": (
            *(attention, attention_reference, "attention"),
            (of_edges, scores, of_scores, None, *graph, *_SETTINGS),
            numbers + edges * _HEADS * x.element_size() + 2 * scores.nbytes,
        ),
        "GATv2's weights": (
            *(leaky_attention, leaky_reference, "leaky_attention"),
            (of_edges, x, other, att, *graph, *_SETTINGS),
            gathered + numbers + rows,
        ),
        "TransformerConv's weights": (
            *(dot_attention, dot_reference, "dot_attention"),
            (of_edges, x, other, None, *graph, 0.125),
            gathered + numbers + rows,
        ),
    }
    jobs = {}
    for name, (ours, theirs, function, arguments, moved) in kinds.items():
        for label, module in ((name, ours), (f"plain {name}", theirs)):
            jobs[label] = Job(functools.partial(getattr(module, function), *arguments), moved)
    return jobs


def measure(jobs: Mapping[str, Job], rounds: int, device: torch.device) -> dict[str, Any]:
    """Time jobs in turn.

    Returns:
        ``milliseconds`` of each round, their median, ``bytes`` and GB/s of each job.
    """
    measured = {}
    for name, seconds in time_on(device, {n: job.run for n, job in jobs.items()}, rounds).items():
        median, moved = statistics.median(seconds), jobs[name].moved
        measured[name] = {
            "milliseconds": [1e3 * second for second in seconds],
            "median_milliseconds": 1e3 * median,
            "bytes": moved,
            "gb_per_s": moved / median / 1e9,
        }
    return measured


def launches(device: torch.device, dtype: torch.dtype, rounds: int) -> dict[str, float]:
    """Return the host's microseconds in one ``pack`` and in one ``copy`` of a small tensor."""
    small = torch.ones(_LAUNCH_ELEMENTS, dtype=dtype, device=device)
    target = torch.empty_like(small)
    jobs = {"pack": lambda: pack(small, _LAUNCH_BITS), "copy": lambda: target.copy_(small)}
    return {
        name: 1e6 * launch_seconds(device, job, _LAUNCHES, rounds) for name, job in jobs.items()
    }


def quantizer(jobs: Mapping[str, Any]) -> Table:
    """Return a row for each width."""
    columns: list[Any] = [("bits", "{bits}")]
    for name in ("pack", "unpack"):
        columns += [
            (f"{name}, ms", f"{{{name}[median_milliseconds]:.3f}}"),
            ("GB/s", f"{{{name}[gb_per_s]:,.1f}}"),
            (f"{name} / copy", f"{{{name}_to_copy:.2f}}"),
        ]
    columns.append(("unpack / clone", "{unpack_to_clone:.2f}"))
    rows = []
    for bits in (name.split()[1] for name in jobs if name.startswith("pack")):
        row: dict[str, Any] = {"bits": bits}
        for name in ("pack", "unpack"):
            row[name] = job = jobs[f"{name} {bits}"]
            for other in ("copy", "clone"):
                ratio = job["median_milliseconds"] / jobs[other]["median_milliseconds"]
                row[f"{name}_to_{other}"] = ratio
        rows.append(row)
    return table(columns, rows)


def by_kernel(jobs: Mapping[str, Any]) -> Table:
    """Return a row for each kernel of edges."""
    pairs = ((name, jobs[name], jobs.get(f"plain {name}")) for name in jobs)
    return table(
        _EDGES,
        (
            {
                **{"job": name, "ours": ours, "plain": plain},
                "speedup": plain["median_milliseconds"] / ours["median_milliseconds"],
            }
            for name, ours, plain in pairs
            if plain
        ),
    )


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
    if on_cuda:
        served = facts()["CUDA kernels"]
    elif cpu.load() is None:
        served = "pure torch"
    else:
        served = f"kernels built for {torch.backends.cpu.get_cpu_capability()}"
    about = {"elements": elements, "bits": args.bits, "group_size": GROUP_SIZE, "kernels": served}
    about |= {name: getattr(args, name) for name in ("dtype", "rounds", "threads")}
    about |= {"device": str(args.device), "gpus": gpus()} | args.origin
    if args.out is not None:
        write_json(args.out, about | results)
    args.show(f"Quantizer on {args.device}, medians", quantizer(results["jobs"]))
    copy, clone = (results["jobs"][name] for name in ("copy", "clone"))
    args.say(
        f"copy {copy['median_milliseconds']:.1f} ms, {copy['gb_per_s']:,.0f} GB/s; clone "
        f"{clone['median_milliseconds']:.1f} ms; bytes are read plus written"
    )
    if launch := results.get("launch_microseconds"):
        args.say(
            f"a small pack from Python takes the host {launch['pack']:.1f} us, a small copy "
            f"{launch['copy']:.1f} us"
        )
    if nodes is not None:
        title = f"Edges on {args.device}, {nodes:,} nodes, medians"
        args.show(title, by_kernel(results["edges"]["jobs"]))
    args.say(
        f"{elements:,} {args.dtype}, {counted(args.rounds, 'round')} in turn, "
        f"{counted(args.threads, 'thread')}, {served}"
    )


if __name__ == "__main__":
    raise SystemExit(main())
