"""Finds what a step would take in each way: it tries them on small graphs."""

from __future__ import annotations

import functools
import gc
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from gact_graph.api.budget.estimate import Estimate
from gact_graph.api.budget.growth import Growth
from gact_graph.api.budget.miniature import CannotShrink, GraphSize, Miniature
from gact_graph.api.budget.runs import Runs, Trials
from gact_graph.api.budget.trial import Subject, Trial
from gact_graph.api.budget.ways import EXACT, LEAST_BITS, MOST_BITS, STOCK, Way, quantizing, ways
from gact_graph.capture.config import Config
from gact_graph.support.cpu_memory import LEAST_RETURNED, give_back, returning_tensors

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
    until_one_fits: bool = False,
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
        until_one_fits: Leave out what is lossier than an exact way that fits.

    Raises:
        CannotShrink: No smaller graph can be made of the inputs.
    """
    miniature = Miniature(*inputs)
    given = miniature.size
    size = GraphSize(nodes or given.nodes, edges or given.edges)
    subject = Subject(model, method, config)
    largest = min(1.0, max(_EDGES / max(1, size.edges), _NODES / max(1, size.nodes)))

    @functools.cache
    def inputs_for(share: float) -> tuple[Any, Any]:
        """For this share of the graph that is meant."""
        if share == 1 and size == given:
            return miniature.whole()
        return miniature.shrunk(
            share * size.nodes / max(1, given.nodes), share * size.edges / max(1, given.edges)
        )

    def run(way: Way, share: float, blocks: float) -> Trial:
        return subject.run(way, inputs_for(share), blocks)

    def estimate() -> Estimate:
        grown = {way: found.growth for way, found in trials.items()}
        lossless = trials.get(EXACT[1])
        if lossless is not None:
            grown[STOCK] = replace(grown[STOCK], saved=lossless.raw)
        return Estimate(_all_widths(grown, subject.device.type), size, memory)

    trials: dict[Way, Trials] = {}
    with returning_tensors(LEAST_RETURNED), _collecting():
        for way in _tried(subject.device.type):
            runs = Runs(functools.partial(run, way), largest)
            wider = trials.get(Way(way.level, MOST_BITS))
            # Fewer bits take no more: where eight keep to the budget, two do.
            keeps = wider is not None and runs.are_all(wider)
            try:
                if keeps:
                    trials[way] = runs.all()
                elif memory is None:
                    trials[way] = runs.first()
                else:
                    trials[way] = runs.within(memory)
            except (IndexError, RuntimeError, ValueError) as error:
                if largest == 1 or isinstance(error, torch.OutOfMemoryError):
                    raise
                told = f"{type(error).__name__}: {error}".splitlines()[0]
                raise CannotShrink(f"some of which no part will do: {told}") from error
            if until_one_fits and way in EXACT and estimate().choose() is not None:
                break
    give_back(subject.device)
    return estimate()


@contextmanager
def _collecting() -> Iterator[None]:
    """Trials leave cycles behind; inside, collecting them takes no look at older objects.

    What is left of them by the end would lie between the objects of the training to come.
    """
    gc.collect()
    is_ours = not gc.get_freeze_count()  # what the user has frozen stays so
    if is_ours:
        gc.freeze()
    try:
        yield
    finally:
        gc.collect()
        if is_ours:
            gc.unfreeze()


def _tried(device_type: str) -> list[Way]:
    coded = [Way(level, bits) for level in quantizing(device_type) for bits in (8, LEAST_BITS)]
    return [*EXACT, *coded]


def _all_widths(grown: dict[Way, Growth], device_type: str) -> dict[Way, Growth]:
    """With the widths between those that were tried."""
    found: dict[Way, Growth] = {}
    for way in ways(device_type):
        most, least = (Way(way.level, bits, way.blocks) for bits in (MOST_BITS, LEAST_BITS))
        if way in grown:
            found[way] = grown[way]
        elif most in grown and least in grown:
            weight = (way.bits - LEAST_BITS) / (MOST_BITS - LEAST_BITS)
            found[way] = grown[least].mixed(grown[most], weight)
    return found
