"""The jobs of ``experiments.kernels``: functions to time, with the bytes that they have to move.

Bytes are counted, read plus written. The graph of sums over edges is random: each node has as many
edges as any other, and its sources lie anywhere. Rows of sources are read once an edge.
"""

from __future__ import annotations

import functools
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from experiments.helpers.timing import launch_seconds, time_on
from gact_graph.ops import attention, dot_attention, leaky_attention, weighted_sum
from gact_graph.ops.checks import TILE
from gact_graph.ops.quantize import pack
from gact_graph.ops.reference import attention as attention_reference
from gact_graph.ops.reference import dot_attention as dot_reference
from gact_graph.ops.reference import leaky_attention as leaky_reference
from gact_graph.ops.reference import weighted_sum as weighted_reference

GROUP_SIZE = 256

_WORD = 8  # bytes of one bit plane of a tile
_STATS = 4  # bytes of a group's lo and step
_LAUNCH_ELEMENTS, _LAUNCH_BITS = 4096, 4
_LAUNCHES = 200  # fewer than a device queues before the host has to wait

_DEGREE, _HEADS, _CHANNELS = 16, 3, 64
_SETTINGS = 0.2, 0.1, 1  # slope, dropout, seed
_INDEX = 4  # bytes of a place


@dataclass(frozen=True)
class Job:
    """A function and the bytes that it moves."""

    run: Callable[[], Any]
    moved: int


def packed_bytes(elements: int, bits: int, group_size: int = GROUP_SIZE) -> int:
    """Return the bytes of codes and stats of a packed tensor."""
    return -(-elements // TILE) * bits * _WORD + -(-elements // group_size) * _STATS


def quantizer_jobs(
    elements: int, widths: Sequence[int], dtype: torch.dtype, device: torch.device
) -> dict[str, Job]:
    """Return ``copy`` (into memory that is there already), ``clone`` (into fresh memory, as unpack
    does), and ``pack b`` and ``unpack b`` of each width."""
    generator = torch.Generator(device).manual_seed(0)
    source = torch.randn(elements, generator=generator, device=device).to(dtype)
    target = torch.empty_like(source)
    jobs = {
        "copy": Job(lambda: target.copy_(source), 2 * source.nbytes),
        "clone": Job(source.clone, 2 * source.nbytes),
    }
    for bits in widths:
        moved = source.nbytes + packed_bytes(elements, bits)
        packing = functools.partial(pack, source, bits, group_size=GROUP_SIZE)
        jobs[f"pack {bits}"] = Job(packing, moved)
        jobs[f"unpack {bits}"] = Job(packing().unpack, moved)
    return jobs


def edge_jobs(nodes: int, device: torch.device) -> dict[str, Job]:
    """Return sums over edges and attention weights, and ``plain`` torch for each, of ``nodes``
    nodes with 16 edges each, 3 heads and 64 channels."""
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
    table: dict[str, tuple[Any, Any, str, tuple[Any, ...], int]] = {
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
    for name, (ours, theirs, function, arguments, moved) in table.items():
        for label, module in ((name, ours), (f"plain {name}", theirs)):
            jobs[label] = Job(functools.partial(getattr(module, function), *arguments), moved)
    return jobs


def measure(jobs: Mapping[str, Job], rounds: int, device: torch.device) -> dict[str, Any]:
    """Time jobs in turn; see :func:`summary`."""
    seconds = time_on(device, {name: job.run for name, job in jobs.items()}, rounds)
    milliseconds = {name: [1e3 * second for second in times] for name, times in seconds.items()}
    return summary(milliseconds, {name: job.moved for name, job in jobs.items()})


def summary(
    milliseconds: Mapping[str, Sequence[float]], moved: Mapping[str, int]
) -> dict[str, Any]:
    """Return ``milliseconds`` of each round, their median, ``bytes`` and GB/s of each job."""
    measured = {}
    for name, times in milliseconds.items():
        median = statistics.median(times)
        speed = moved[name] / median / 1e6
        measured[name] = {
            "milliseconds": list(times),
            "median_milliseconds": median,
            "bytes": moved[name],
            "gb_per_s": speed,
        }
    return measured


def launches(device: torch.device, dtype: torch.dtype, rounds: int) -> dict[str, float]:
    """Return microseconds of the host in one ``pack`` of a small tensor and one ``copy`` of it."""
    small = torch.ones(_LAUNCH_ELEMENTS, dtype=dtype, device=device)
    target = torch.empty_like(small)
    jobs = {"pack": lambda: pack(small, _LAUNCH_BITS), "copy": lambda: target.copy_(small)}
    return {
        name: 1e6 * launch_seconds(device, job, _LAUNCHES, rounds) for name, job in jobs.items()
    }
