"""Trials of strategies on parts of the graph, and the memory of the whole graph by extrapolation.

A peak is the highest of several moments of a step, each a linear function of the size of the graph.
So the whole graph takes at least the extrapolation of two parts, and at most the peak of one part
divided by its share. Parts grow until the bounds are close.
"""

from __future__ import annotations

import gc
from dataclasses import replace
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
    Strategy,
    quantizing,
    strategies,
)
from gact_graph.api.budget.miniature import CannotShrink, GraphSize, Miniature
from gact_graph.api.budget.steps import TrainedCopy, Trial, undisturbed
from gact_graph.capture.config import Config
from gact_graph.support.peak import resident_bytes

_EDGES, _NODES = 1 << 14, 1 << 10
"""The size of the second part for each strategy; the first part is a quarter of it."""

_FEW_EDGES, _FEW_NODES = 1 << 9, 1 << 6
"""The size of the very first part, tried while its memory is unknown."""

_MOST = 0.5
"""The share of the largest part."""

_LARGER = 1.25
"""The least ratio of the sizes of two parts from which a line can be extrapolated."""

_CLOSE = 1.1
"""The ratio of the upper to the lower bound of a peak at which no larger part is needed."""

_MOMENTS = 2
"""Tensors per parameter that the optimizer is expected to keep."""

_FIXED = 1 << 18
"""Bytes that a step may take for any graph, in addition to the fixed bytes of stock."""

_FAR = 4
"""The ratio of stock's peak to the budget from which the smallest strategies are tried first."""

_NO_PART = (IndexError, RuntimeError, ValueError)
"""The errors of a model that does not run on a part of its graph."""


def estimate_call(
    model: nn.Module,
    method: str,
    inputs: tuple[Any, Any],
    config: Config,
    memory: int | None,
    nodes: int | None = None,
    edges: int | None = None,
    first: Strategy | None = None,
    choosing: bool = False,
) -> Estimate:
    """Estimate the memory of a training step under each strategy by trials on parts of the graph.

    Args:
        model: The module.
        method: The name of the method that training calls.
        inputs: The positional and named arguments of the method.
        config: The settings that all strategies share.
        memory: The budget in bytes, which holds for the trials, too.
        nodes: The number of nodes to extrapolate to; default: as in the inputs.
        edges: The number of edges to extrapolate to; default: as in the inputs.
        first: The strategy to try before all others.
        choosing: Whether to stop at the first strategy that fits.

    Raises:
        CannotShrink: If the inputs have no parts that the model runs on.
    """
    with undisturbed(next(model.parameters()).device):
        search = Search(model, method, inputs, config, memory, nodes, edges, choosing)
        if not choosing:
            search.try_all()
        elif first is None or not search.fits(first):
            search.choose()
        estimate = search.estimate()
        del search  # and its copy of the model, before memory is released
        return estimate


class Search:
    """The trials of one call of a model; see :func:`estimate_call`."""

    def __init__(
        self,
        model: nn.Module,
        method: str,
        inputs: tuple[Any, Any],
        config: Config,
        memory: int | None,
        nodes: int | None = None,
        edges: int | None = None,
        choosing: bool = False,
    ) -> None:
        self._model, self._method, self._config = model, method, config
        self._memory, self._choosing = memory, choosing
        self._miniature = Miniature(*inputs)
        own = self._miniature.size
        self._size = GraphSize(nodes or own.nodes, edges or own.edges)
        self._device = next(model.parameters()).device
        self._resident = resident_bytes()
        self._parameters = 0
        self._fixed = float("inf")  # bytes that a step takes for any graph, once known
        self._costs: dict[Strategy, Cost] = {}
        self._trials: dict[tuple[Strategy, float], Trial] = {}
        self._copy: TrainedCopy | None = None  # for the last strategy
        self._coded = [Strategy(level, LEAST_BITS) for level in quantizing(self._device.type)]
        self._second = min(_MOST / 2, self._share_of(_NODES, _EDGES))
        few = self._share_of(_FEW_NODES, _FEW_EDGES)
        self._first = self._run(STOCK, min(self._second / 4, few))

    def try_all(self) -> None:
        """Find the costs of all strategies."""
        for strategy in (STOCK, LOSSLESS, BLOCKS, *self._coded):
            self._find_cost(strategy)

    def choose(self) -> None:
        """Find costs until the first strategy that fits is known, or that no strategy fits."""
        if self.fits(STOCK):
            return
        is_far = self.estimate().peak_of(STOCK) > _FAR * (self._memory or 0)
        if is_far and not any(self._may_fit(strategy) for strategy in self._coded):
            return  # exact strategies take no less
        for strategy in (LOSSLESS, BLOCKS, *self._coded):
            if self.fits(strategy):
                return

    def fits(self, strategy: Strategy) -> bool:
        """Return whether a strategy fits the budget."""
        if strategy not in self._costs:
            quantizes = strategy.bits < 32
            self._find_cost(strategy._replace(bits=LEAST_BITS) if quantizes else strategy)
        return self.estimate().fits(strategy, self._size)

    def estimate(self) -> Estimate:
        """Return the estimate by the costs known so far."""
        known = {s: self._costs[s] for s in strategies(self._device.type) if s in self._costs}
        quarters = self._config.adaptive
        return Estimate(known, self._size, self._memory, self._standing, quarters)

    @property
    def _standing(self) -> int:
        return _MOMENTS * self._parameters + self._grown()

    def _may_fit(self, strategy: Strategy) -> bool:
        """Return whether a strategy that quantizes may fit, by a step that measures nothing."""
        share = self._share_after(self._first, self._second / 4)
        trial = self._trial(strategy, share, replace(self._config, adaptive=False))
        if not self._is_hopeless(trial):
            return True
        self._add_cost(strategy, trial, trial)
        return False

    def _find_cost(self, strategy: Strategy) -> None:
        """Find the cost of a strategy; if it quantizes, for all numbers of bits."""
        low = self._first
        if strategy != STOCK:
            low = self._run(strategy, self._share_after(self._first, self._second / 4))
        high = low
        if not self._is_hopeless(low):
            high = self._run(strategy, self._share_after(low, self._second))
        while not self._are_enough(strategy, low, high):
            share = self._share_after(high, min(_MOST, 4 * high.share))
            if share < 1.5 * high.share:
                break
            low, high = high, self._run(strategy, share)
        self._add_cost(strategy, low, high)

    def _add_cost(self, strategy: Strategy, low: Trial, high: Trial) -> None:
        """Extrapolate two trials of a strategy to its cost."""
        peak = _line(low, high, "peak")
        if strategy == STOCK:
            self._fixed = max(peak.fixed, self._parameters) + _FIXED
        if high.peak / high.share > _CLOSE * peak.at(1.0):
            peak = Line(0.0, high.peak / high.share)
        if strategy == LOSSLESS and STOCK in self._costs:
            self._costs[STOCK] = Cost(self._costs[STOCK].peak, _line(low, high, "raw"))
        self._costs[strategy] = cost = Cost(peak, _line(low, high, "saved"))
        if strategy.bits < 32:
            element = _line(low, high, "coded")
            for bits in range(LEAST_BITS, MOST_BITS + 1):
                more = element.times((bits - LEAST_BITS) / 8)
                wider = Cost(cost.peak.plus(more), cost.saved.plus(more))
                self._costs[strategy._replace(bits=bits)] = wider

    def _is_hopeless(self, trial: Trial) -> bool:
        """Return whether a single trial shows that a strategy does not fit."""
        growing = max(0.0, trial.peak - self._fixed)
        return self._choosing and not self._is_kept(trial.peak - growing + growing / trial.share)

    def _is_kept(self, peak: float) -> bool:
        return Estimate.budget_for(self._standing + peak) <= (self._memory or 0)

    def _are_enough(self, strategy: Strategy, low: Trial, high: Trial) -> bool:
        """Return whether two trials determine the peak, or whether it fits."""
        least, most = _line(low, high, "peak").at(1.0), high.peak / high.share
        if self._memory is None or most <= _CLOSE * least:
            return most <= _CLOSE * least
        return not self._is_kept(least) or (strategy.bits == 32 and self._is_kept(most))

    def _share_of(self, nodes: int, edges: int) -> float:
        return max(edges / max(1, self._size.edges), nodes / max(1, self._size.nodes))

    def _share_after(self, trial: Trial, wanted: float) -> float:
        """Return the share of a part that keeps to the budget, judging by an earlier trial."""
        if self._memory is None:
            return wanted
        # Without the copy of the model and its gradients; half of the rest stays free.
        room = self._memory - self._grown() - (2 + _MOMENTS) * self._parameters
        taken = max(1, trial.held + trial.peak - self._parameters)
        share = min(wanted, room / 2 * trial.share / taken)
        return share if share > _LARGER * trial.share else trial.share

    def _grown(self) -> int:
        """Return the bytes of libraries that the process has loaded since the search began."""
        if self._device.type != "cpu" or self._resident is None:
            return 0
        return max(0, (resident_bytes() or 0) - self._resident)

    def _run(self, strategy: Strategy, share: float) -> Trial:
        """Return the trial of a strategy on a part of the graph, from memory if there is one."""
        trial = self._trials.get((strategy, share))
        if trial is None:  # a small budget leaves room for a single share
            trial = self._trials[strategy, share] = self._trial(strategy, share, self._config)
        return trial

    def _trial(self, strategy: Strategy, share: float, config: Config) -> Trial:
        if self._copy is None or self._copy.settings != (strategy, config):
            self._copy = None  # frees the last copy before the next is made
            gc.collect()
            self._copy = TrainedCopy(self._model, self._method, strategy, config)
        own = self._miniature.size
        inputs = self._miniature.shrunk(
            share * self._size.nodes / max(1, own.nodes),
            share * self._size.edges / max(1, own.edges),
        )
        try:
            trial = self._copy.train(inputs, share)
        except torch.OutOfMemoryError:
            raise
        except _NO_PART as error:
            reason = f"{type(error).__name__}: {error}".splitlines()[0]
            raise CannotShrink(f"a graph of which no part can be used: {reason}") from error
        self._parameters = self._copy.parameter_bytes  # lazy parameters are initialized by now
        return trial


def _line(low: Trial, high: Trial, name: str) -> Line:
    """Return the line through two trials; slope and intercept are not negative."""
    at_low, at_high = getattr(low, name), getattr(high, name)
    if high.share <= low.share:
        return Line(0.0, at_high / high.share)
    growing = max(0.0, (at_high - at_low) / (high.share - low.share))
    return Line(max(0.0, at_high - growing * high.share), growing)
