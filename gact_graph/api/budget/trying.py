"""Finds what a step would take in each way: it tries them on small graphs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

from torch import nn

from gact_graph.api.budget.estimate import Estimate
from gact_graph.api.budget.growth import Growth, Line
from gact_graph.api.budget.miniature import GraphSize, Miniature
from gact_graph.api.budget.trial import Subject, Trial
from gact_graph.api.budget.ways import EXACT, LEAST_BITS, MOST_BITS, STOCK, Way, quantizing, ways
from gact_graph.capture.config import Config
from gact_graph.support.heap import LEAST_RETURNED, returning_tensors

_EDGES = 1 << 17
"""Edges of the larger of the two graphs that are tried: some blocks of a layer in blocks."""

_NODES = 1 << 12
"""And its nodes at least: with fewer, what does not grow with the graph hides what does."""


def estimate_call(
    model: nn.Module,
    method: str,
    inputs: tuple[Any, Any],
    config: Config,
    memory: int | None,
    nodes: int | None = None,
    edges: int | None = None,
) -> Estimate:
    """Tries each way on two small graphs and extends what they take to the whole.

    Args:
        model: The module.
        method: The method that is called in training.
        inputs: Its positional and named arguments.
        config: The settings that all ways share.
        memory: The budget in bytes.
        nodes: Of the graph that is meant, if it is not the one in the inputs.
        edges: Likewise.

    Raises:
        CannotShrink: No smaller graph can be made of the inputs.
    """
    miniature = Miniature(*inputs)
    given = miniature.size
    size = GraphSize(nodes or given.nodes, edges or given.edges)
    subject = Subject(model, method, config)
    shares = [*_shares(size)]
    found: dict[Way, list[Trial]] = {}
    with returning_tensors(LEAST_RETURNED):
        for share in shares:
            small = inputs
            if share < 1 or size != given:
                small = miniature.shrunk(
                    share * size.nodes / max(1, given.nodes),
                    share * size.edges / max(1, given.edges),
                )
            for way in _tried(subject.device.type):
                found.setdefault(way, []).append(subject.run(way, small))
    grown = {way: _growth(shares, trials) for way, trials in found.items()}
    raw = [trial.raw_bytes or 0 for trial in found[EXACT[1]]]
    grown[STOCK] = replace(grown[STOCK], saved=_line(shares, raw))
    return Estimate(_all_widths(grown, subject.device.type), size, memory)


def _shares(size: GraphSize) -> Iterator[float]:
    """Of the graphs that are tried: the whole, if that is small, else two small ones."""
    largest = max(_EDGES / max(1, size.edges), _NODES / max(1, size.nodes))
    if largest >= 1:
        yield 1.0
    else:
        yield largest / 2
        yield largest


def _tried(device_type: str) -> list[Way]:
    coded = [Way(level, bits) for level in quantizing(device_type) for bits in (8, LEAST_BITS)]
    return [*EXACT, *coded]


def _growth(shares: Sequence[float], trials: Sequence[Trial]) -> Growth:
    return Growth(
        _line(shares, [trial.peak_bytes for trial in trials]),
        _line(shares, [trial.saved_bytes or 0 for trial in trials]),
        Line(0.0, trials[-1].seconds / shares[-1]),
    )


def _line(shares: Sequence[float], values: Sequence[float]) -> Line:
    return Line.through(shares[0], values[0], shares[-1], values[-1])


def _all_widths(grown: dict[Way, Growth], device_type: str) -> dict[Way, Growth]:
    """With the widths between those that were tried."""
    found: dict[Way, Growth] = {}
    for way in ways(device_type):
        if way in grown:
            found[way] = grown[way]
            continue
        most, least = (grown[Way(way.level, bits)] for bits in (MOST_BITS, LEAST_BITS))
        found[way] = least.mixed(most, (way.bits - LEAST_BITS) / (MOST_BITS - LEAST_BITS))
    return found
