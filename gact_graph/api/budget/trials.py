"""Trials of ways to train: on which parts of the graph, and what the whole takes by them.

A peak is the highest of several moments of a step, each of which grows with the graph along a
straight line. So the whole takes at least what the line through two parts says, and at most what
one part takes, divided by its share. Parts grow until the two are close.
"""

from __future__ import annotations

import gc
from typing import Any

import torch
from torch import nn

from gact_graph.api.budget.estimate import (
    BLOCKS,
    LEAST_BITS,
    LOSSLESS,
    MOST_BITS,
    STOCK,
    Cost,
    Estimate,
    Line,
    Way,
    quantizing,
    ways,
)
from gact_graph.api.budget.miniature import CannotShrink, GraphSize, Miniature
from gact_graph.api.budget.steps import TrainedCopy, Trial, undisturbed
from gact_graph.capture.config import Config
from gact_graph.support.peak import resident_bytes

_EDGES, _NODES = 1 << 14, 1 << 10
"""Of the second part that is tried in each way; the first has a quarter."""

_FEW_EDGES, _FEW_NODES = 1 << 9, 1 << 6
"""Of the first part of all, when nothing is known of what it takes."""

_MOMENTS = 2
"""What an optimizer is expected to hold, in tensors of a parameter's size."""

_MOST = 0.5
"""The largest part that is tried."""

_LARGER = 1.25
"""A part that is not larger than another one by this factor has nothing new to show."""

_FIXED = 1 << 20
"""Bytes that a step may take for a graph of any size, beside gradients and optimizer."""

_CLOSE = 1.1
"""Two trials are enough when what the whole takes at most is within this of what it takes at
least."""

_NO_PART = (IndexError, RuntimeError, ValueError)
"""What a model raises that takes no part of its graph."""


def estimate_call(
    model: nn.Module,
    method: str,
    inputs: tuple[Any, Any],
    config: Config,
    memory: int | None,
    nodes: int | None = None,
    edges: int | None = None,
    first: Way | None = None,
    choosing: bool = False,
) -> Estimate:
    """Tries ways to train on small parts of the graph and extends what they take to the whole.

    Args:
        model: The module.
        method: The method that is called in training.
        inputs: Its positional and named arguments.
        config: The settings that all ways share.
        memory: The budget in bytes. The copy of the model and what the trials add take no more.
        nodes: Of the graph that is meant, if it is not the one in the inputs.
        edges: Likewise.
        first: The way that is tried before others.
        choosing: Try no more ways than it takes to find the first that fits.

    Raises:
        CannotShrink: No smaller graph can be made of the inputs.
    """
    with undisturbed(next(model.parameters()).device):
        trials = _Trials(model, method, inputs, config, memory, nodes, edges, choosing)
        if not choosing:
            for way in (STOCK, LOSSLESS, BLOCKS, *trials.coded):
                trials.see(way)
        elif first is None or not trials.fits(first):
            trials.choose()
        found = trials.estimate()
        del trials  # and its copy of the model, before memory goes back
        return found


class _Trials:
    """Of one call of a model; see :func:`estimate_call`."""

    def __init__(
        self,
        model: nn.Module,
        method: str,
        inputs: tuple[Any, Any],
        config: Config,
        memory: int | None,
        nodes: int | None,
        edges: int | None,
        choosing: bool = False,
    ) -> None:
        self._choosing = choosing
        self._model, self._method, self._config = model, method, config
        self._memory = memory
        self._miniature = Miniature(*inputs)
        self._given = self._miniature.size
        self._size = GraphSize(nodes or self._given.nodes, edges or self._given.edges)
        self._device = next(model.parameters()).device
        self._resident = resident_bytes()
        self._parameters = 0
        self._costs: dict[Way, Cost] = {}
        self._trials: dict[tuple[Way, float], Trial] = {}
        self._copy: TrainedCopy | None = None  # of the way that was tried last
        self.coded = [Way(level, LEAST_BITS) for level in quantizing(self._device.type)]
        part = max(_EDGES / max(1, self._size.edges), _NODES / max(1, self._size.nodes))
        self._second = min(_MOST / 2, part)
        few = max(_FEW_EDGES / max(1, self._size.edges), _FEW_NODES / max(1, self._size.nodes))
        self._first = self._run(STOCK, min(self._second / 4, few))

    def choose(self) -> None:
        """Sees no more ways than it takes to find the first that fits."""
        for way in (STOCK, LOSSLESS, BLOCKS, *self.coded):
            if self.fits(way):
                return

    def fits(self, way: Way) -> bool:
        """Whether a way fits the budget."""
        if way not in self._costs:
            self.see(way if way.bits == 32 else way._replace(bits=LEAST_BITS))
        return self.estimate().fits(way, self._size)

    def estimate(self) -> Estimate:
        """What is known by now."""
        known = {way: self._costs[way] for way in ways(self._device.type) if way in self._costs}
        return Estimate(known, self._size, self._memory, self._standing)

    @property
    def _standing(self) -> int:
        return _MOMENTS * self._parameters + self._grown()

    def see(self, way: Way) -> None:
        """Find what a way takes; of one that quantizes, at all widths."""
        low = self._first
        if way != STOCK:
            low = self._run(way, self._share_after(self._first, self._second / 4))
        high = low
        if not self._is_hopeless(low):
            high = self._run(way, self._share_after(low, self._second))
        while not self._is_enough(way, low, high):
            share = self._share_after(high, min(_MOST, 4 * high.share))
            if share < 1.5 * high.share:
                break
            low, high = high, self._run(way, share)
        peak = _line(low, high, "peak")
        if high.peak / high.share > _CLOSE * peak.at(1.0):
            peak = Line(0.0, high.peak / high.share)
        if way == LOSSLESS and STOCK in self._costs:
            self._costs[STOCK] = Cost(self._costs[STOCK].peak, _line(low, high, "raw"))
        self._costs[way] = cost = Cost(peak, _line(low, high, "saved"))
        if way.bits < 32:
            element = _line(low, high, "coded")
            for bits in range(LEAST_BITS, MOST_BITS + 1):
                more = element.times((bits - LEAST_BITS) / 8)
                wider = Cost(cost.peak.plus(more), cost.saved.plus(more))
                self._costs[way._replace(bits=bits)] = wider

    def _is_hopeless(self, trial: Trial) -> bool:
        """Whether one part tells that a way does not fit.

        What does not grow with the graph is at most the gradients and :data:`_FIXED`.
        """
        fixed = self._parameters + _FIXED
        least = max(trial.peak, fixed + (trial.peak - fixed) / trial.share)
        return self._choosing and not self._is_kept(least)

    def _is_kept(self, peak: float) -> bool:
        return Estimate.budget_for(self._standing + peak) <= (self._memory or 0)

    def _is_enough(self, way: Way, low: Trial, high: Trial) -> bool:
        """Whether two trials say what the whole takes, or whether that fits."""
        least, most = _line(low, high, "peak").at(1.0), high.peak / high.share
        if self._memory is None or most <= _CLOSE * least:
            return most <= _CLOSE * least
        return not self._is_kept(least) or (way.bits == 32 and self._is_kept(most))

    def _share_after(self, trial: Trial, wanted: float) -> float:
        """A share that keeps to the budget, by what another one has taken."""
        if self._memory is None:
            return wanted
        # The copy of the model and its gradients; half of the rest stays free.
        room = self._memory - self._grown() - (2 + _MOMENTS) * self._parameters
        taken = max(1, trial.held + trial.peak - self._parameters)
        share = min(wanted, room / 2 * trial.share / taken)
        return share if share > _LARGER * trial.share else trial.share

    def _grown(self) -> int:
        """What the process has loaded since the start."""
        if self._device.type != "cpu" or self._resident is None:
            return 0
        return max(0, (resident_bytes() or 0) - self._resident)

    def _run(self, way: Way, share: float) -> Trial:
        """Train on a part of the graph in one way, unless that has been done."""
        known = self._trials.get((way, share))
        if known is None:  # a small budget leaves room for no more than one share
            known = self._trials[way, share] = self._trial(way, share)
        return known

    def _trial(self, way: Way, share: float) -> Trial:
        if self._copy is None or self._copy.way != way:
            self._copy = None  # before there is another one
            gc.collect()
            self._copy = TrainedCopy(self._model, self._method, way, self._config)
        inputs = self._miniature.shrunk(
            share * self._size.nodes / max(1, self._given.nodes),
            share * self._size.edges / max(1, self._given.edges),
        )
        try:
            trial = self._copy.train(inputs, share)
        except _NO_PART as error:
            if isinstance(error, torch.OutOfMemoryError):
                raise
            reason = f"{type(error).__name__}: {error}".splitlines()[0]
            raise CannotShrink(f"some of which no part will do: {reason}") from error
        # By now parameters that are initialised lazily have a size.
        self._parameters = self._copy.parameter_bytes
        return trial


def _line(low: Trial, high: Trial, name: str) -> Line:
    """The line through two trials; nothing shrinks where the graph grows."""
    at_low, at_high = getattr(low, name), getattr(high, name)
    if high.share <= low.share:
        return Line(0.0, at_high / high.share)
    growing = max(0.0, (at_high - at_low) / (high.share - low.share))
    return Line(max(0.0, at_high - growing * high.share), growing)
