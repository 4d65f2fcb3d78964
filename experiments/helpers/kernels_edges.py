"""``experiments.kernels --device cuda``: sums over edges and attention beside plain torch.

The graph is random, each node has as many edges as any other, and its sources lie anywhere. A job's
bytes are those that have to move at least: rows of sources once an edge, and what is read and
written of edges and nodes.
"""

from __future__ import annotations

import functools
import statistics
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from experiments.helpers.kernels_cuda import gigabytes_per_second
from experiments.helpers.timing import time_on
from gact_graph.ops import attention, dot_attention, leaky_attention, weighted_sum
from gact_graph.ops.reference import attention as attention_reference
from gact_graph.ops.reference import dot_attention as dot_reference
from gact_graph.ops.reference import leaky_attention as leaky_reference
from gact_graph.ops.reference import weighted_sum as weighted_reference

HEAD = ("job", "ms", "GB/s", "plain torch, ms", "times as fast")

DEFAULT_NODES = 200_000

_DEGREE, _HEADS, _CHANNELS = 16, 3, 64
_SLOPE, _DROPOUT, _SEED = 0.2, 0.1, 1
_INDEX = 4  # bytes of a place


def measure(nodes: int, rounds: int, device: torch.device) -> dict[str, Any]:
    """Time each job and what plain torch takes for the same.

    Args:
        nodes: Of the graph, with 16 edges each, 3 heads and 64 channels.
        rounds: Times each job is run, after one warm-up.
        device: CUDA; on the CPU the same jobs are timed by the host's clock.

    Returns:
        ``nodes``, ``edges``, ``heads``, ``channels``, and ``jobs`` with the medians in
        milliseconds, the bytes and the speed of each.
    """
    graph = _Graph(nodes, device)
    kernels, plain, moved = graph.jobs()
    jobs = kernels | {f"plain {name}": job for name, job in plain.items()}
    seconds = time_on(device, jobs, rounds)
    median = {name: 1e3 * statistics.median(times) for name, times in seconds.items()}
    return {
        "nodes": nodes,
        "edges": nodes * _DEGREE,
        "heads": _HEADS,
        "channels": _CHANNELS,
        "jobs": {
            name: {
                "median_milliseconds": median[name],
                "bytes": moved[name],
                "gb_per_s": gigabytes_per_second(moved[name], median[name]),
                "plain_milliseconds": median[f"plain {name}"],
            }
            for name in kernels
        },
    }


def table(found: dict[str, Any]) -> list[tuple[str, ...]]:
    """Return the rows under :data:`HEAD`, one a job."""
    return [
        (
            name,
            f"{job['median_milliseconds']:.3f}",
            f"{job['gb_per_s']:,.0f}",
            f"{job['plain_milliseconds']:.3f}",
            f"{job['plain_milliseconds'] / job['median_milliseconds']:.1f}",
        )
        for name, job in found["jobs"].items()
    ]


_Jobs = dict[str, Callable[[], Any]]


class _Graph:
    def __init__(self, nodes: int, device: torch.device) -> None:
        generator = torch.Generator(device).manual_seed(0)
        self.edges, width = nodes * _DEGREE, _HEADS * _CHANNELS

        def normal(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=generator, device=device)

        places = torch.randint(nodes, (self.edges,), generator=generator, device=device)
        self.places = places.int()
        self.positions = torch.arange(self.edges, device=device, dtype=torch.int32)
        self.starts = torch.arange(nodes + 1, device=device) * _DEGREE
        self.x, self.other = normal(nodes, width), normal(nodes, width)
        self.weight = normal(self.edges, _HEADS)
        self.scores, self.of_scores = normal(nodes, _HEADS), normal(nodes, _HEADS)
        self.att = normal(_HEADS, _CHANNELS)
        self.out, self.of_edges = torch.empty_like(self.x), torch.empty_like(self.weight)

    def jobs(self) -> tuple[_Jobs, _Jobs, dict[str, int]]:
        """The kernels, plain torch, and the bytes that have to move."""
        edges, one = (self.places, None, self.starts), self.x.element_size()
        settings = _SLOPE, _DROPOUT, _SEED
        given: dict[str, tuple[Any, Any, str, tuple[Any, ...]]] = {
            "sum": (
                *(weighted_sum, weighted_reference, "weighted_sum"),
                (self.out, self.x, self.places, self.weight, None, self.starts),
            ),
            "sum, backward": (
                *(weighted_sum, weighted_reference, "weighted_sum_backward"),
                (
                    *(self.out, self.of_edges, self.other, self.x, self.places, self.weight),
                    *(self.positions, self.starts),
                ),
            ),
            "GAT's weights": (
                *(attention, attention_reference, "attention"),
                (self.of_edges, self.scores, self.of_scores, None, *edges, *settings),
            ),
            "GATv2's weights": (
                *(leaky_attention, leaky_reference, "leaky_attention"),
                (self.of_edges, self.x, self.other, self.att, *edges, *settings),
            ),
            "TransformerConv's weights": (
                *(dot_attention, dot_reference, "dot_attention"),
                (self.of_edges, self.x, self.other, None, *edges, 0.125),
            ),
        }
        kernels: _Jobs = {
            name: functools.partial(getattr(ours, function), *args)
            for name, (ours, _, function, args) in given.items()
        }
        plain: _Jobs = {
            name: functools.partial(getattr(theirs, function), *args)
            for name, (_, theirs, function, args) in given.items()
        }
        of_edges = self.edges * (_INDEX + _HEADS * one)
        rows, gathered = self.x.nbytes, self.edges * self.x.size(1) * one
        moved = {
            "sum": gathered + of_edges + rows,
            "sum, backward": gathered + 2 * of_edges + 2 * rows,
            "GAT's weights": of_edges + self.edges * _HEADS * one + 2 * self.scores.nbytes,
            "GATv2's weights": gathered + of_edges + rows,
            "TransformerConv's weights": gathered + of_edges + rows,
        }
        return kernels, plain, moved
