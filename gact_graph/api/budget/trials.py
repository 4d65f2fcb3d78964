"""Trials of strategies on parts of the graph, and the memory of the whole graph by extrapolation.

A part of a step takes memory that is linear in the size of the graph, so two trials determine it
for the whole. Mixed strategies come from a model of these parts, and a trial of each corrects it.
"""

from __future__ import annotations

import gc
import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Final

import torch
import torch.distributed as dist
from torch import nn

from gact_graph.adaptive.allocator import noise
from gact_graph.api.budget.estimate import (
    BLOCKS,
    FAST,
    LEAST_BITS,
    LOSSLESS,
    MOST_BITS,
    QUANTIZING,
    STOCK,
    Cost,
    Estimate,
    Line,
    Peak,
    Strategy,
    strategies,
)
from gact_graph.api.budget.memory_model import alike
from gact_graph.api.budget.miniature import CannotShrink, GraphSize, Miniature
from gact_graph.api.budget.mixed import Mixed, seconds_of_element
from gact_graph.api.budget.planned_tensor import PlannedTensor
from gact_graph.api.budget.steps import TrainedCopy, Trial, undisturbed
from gact_graph.capture.config import MIN_BYTES, Config
from gact_graph.codecs.offload.speed import can_offload, seconds_of_byte
from gact_graph.ops.weighted_sum import makes_messages
from gact_graph.support.memory.limits import is_out_of_memory
from gact_graph.support.peak import resident_bytes
from gact_graph.support.progress import progress
from gact_graph.support.sharded import is_sharded

_EDGES, _NODES = 1 << 14, 1 << 10
"""The size of the second part for each strategy; the first part is a quarter of it."""

_FEW_EDGES, _FEW_NODES = 1 << 9, 1 << 6
"""The size of the very first part, tried while its memory is unknown."""

_MOST = 0.25
"""The share of the largest part."""

_MOST_OF_STOCK = 1 / 32
"""The share of the second part for stock, on which it takes less memory than another strategy on
the whole graph."""

_LARGER = 1.25
"""The least ratio of the sizes of two parts from which a line can be extrapolated."""

_MOMENTS = 2
"""Tensors per parameter that the optimizer is expected to keep."""

_FIXED = 1 << 18
"""Bytes that a step may take for any graph, in addition to the fixed bytes of stock."""

_FAR = 4
"""The ratio of stock's peak to the budget from which the smallest strategies are tried first."""

_WEIGHTS = {"time": 10.0, "accuracy": 1000.0}
"""The weight of the squared error of the gradient beside the time of a step, by preference: with
10, an error of 10 % counts as much as a tenth of a step."""

_CHEAP = 0.1
"""The time and the weighted error of a strategy, in steps, below which no other level is tried."""


def estimate_call(
    model: nn.Module,
    method: str,
    inputs: tuple[Any, Any],
    config: Config,
    memory: int | None,
    nodes: int | None = None,
    edges: int | None = None,
) -> Estimate:
    """Estimate the memory of a training step under each strategy by trials on parts of the graph.

    Arguments are those of :class:`Search`.

    Raises:
        CannotShrink: If the inputs have no parts that the model runs on.
    """
    with progress("estimating training steps"), undisturbed(next(model.parameters()).device):
        search = Search(model, method, inputs, config, memory, nodes, edges)
        search.try_all()
        estimate = search.estimate()
        del search  # and its copy of the model, before memory is released
        return estimate


class Search:
    """The trials of one call of a model.

    Args:
        model: The module.
        method: The name of the method that training calls.
        inputs: The positional and named arguments of the method.
        config: The settings that all strategies share.
        memory: The budget in bytes, which holds for the trials, too; None for none.
        nodes: The number of nodes to extrapolate to; default: as in the inputs.
        edges: The number of edges to extrapolate to; default: as in the inputs.
        prefer: What counts first among strategies that fit, ``"time"`` or ``"accuracy"``; None to
            estimate strategies that do not fit with the same care.
        pace: The time of a real step over that of trials.

    Attributes:
        size: The size of the graph to extrapolate to.
        device: The device of the model.

    Raises:
        CannotShrink: If the inputs have no parts that the model runs on.
        ValueError: If the parameters are sharded, batch norm is synchronized, or the model cannot
            be copied.
    """

    def __init__(
        self,
        model: nn.Module,
        method: str,
        inputs: tuple[Any, Any],
        config: Config,
        memory: int | None,
        nodes: int | None = None,
        edges: int | None = None,
        prefer: str | None = None,
        pace: float = 1.0,
    ) -> None:
        synced = any(isinstance(module, nn.SyncBatchNorm) for module in model.modules())
        if synced and dist.is_initialized() and dist.get_world_size() > 1:
            raise ValueError(
                "Expected a model without SyncBatchNorm, to estimate or plan a training step on "
                f"one of {dist.get_world_size()} processes (got a {type(model).__name__} with it); "
                "plan before convert_sync_batchnorm, then gact_graph.wrap(model, plan=plan)"
            )
        if is_sharded(model):
            raise ValueError(
                "Expected a model whose parameters are not sharded, to estimate or plan a training "
                f"step (got a {type(model).__name__} sharded by FSDP); plan first, then "
                "gact_graph.wrap(model, plan=plan), then fully_shard"
            )
        self._model, self._method, self._config = model, method, config
        self._memory, self._prefer, self._pace = memory, prefer, pace
        self._miniature = Miniature(*inputs)
        own = self._miniature.size
        self.size: Final = GraphSize(
            own.nodes if nodes is None else nodes, own.edges if edges is None else edges
        )
        self.device: torch.device = next(model.parameters()).device
        self._resident = resident_bytes()
        makes_messages(self.device)  # loads the kernels; trials would hide a warning
        self._parameters = 0
        self._fixed = float("inf")  # bytes that a step takes for any graph, once known
        self._costs: dict[Strategy, Cost] = {}
        self._trials: dict[tuple[Strategy, float], Trial] = {}
        self._largest: dict[Strategy, Trial] = {}  # of each strategy with a known cost
        self._hopeless: dict[Strategy, bool] = {}
        self._seconds: dict[Strategy, float] = {}  # of a step, by strategies with a known cost
        self._copy: TrainedCopy | None = None  # for the last strategy
        levels = [n for n in QUANTIZING if n != "L2" or can_offload(self.device)]
        self._coded = [Strategy(level, LEAST_BITS) for level in levels]
        self._second = min(_MOST, self._share_of(_NODES, _EDGES))
        few = self._share_of(_FEW_NODES, _FEW_EDGES)
        self._first = self._run(STOCK, min(self._second / 4, few))

    def try_all(self) -> None:
        """Find the costs of all strategies."""
        for strategy in (STOCK, LOSSLESS, BLOCKS, *self._coded):
            self._find_cost(strategy)

    def choose(self, first: Strategy | None = None) -> Strategy | None:
        """Return the preferred strategy that fits; None if there is none.

        Args:
            first: The strategy that is preferred to all others.
        """
        stock_fits = self._fits(STOCK)
        if first is not None and self._fits(first):
            return first
        if stock_fits and (self._prefer == "accuracy" or self._is_small):
            return STOCK
        is_far = self.estimate().peak_of(STOCK) > _FAR * (self._memory or 0)
        # Blocks first: the libraries that codes load take a large part of a small budget.
        if is_far and not any(map(self._may_fit, (BLOCKS, *self._coded))):
            return None
        exact: tuple[Strategy, ...] = FAST, BLOCKS
        if self._prefer == "accuracy":
            exact = LOSSLESS, *exact, *(coded._replace(bits=32) for coded in self._coded[1:])
        found = next(filter(self._fits, exact), None)
        if found is not None:
            return found
        for coded in filter(self._may_fit, self._coded):
            other = self._mixed(coded) or self._widest(coded)
            if other is not None and (found is None or self._price(other) < self._price(found)):
                found = other
            if found is not None and self._price(found) <= _CHEAP:
                break
        return found

    def _price(self, strategy: Strategy) -> float:
        """Return the time and the error that a strategy adds, in exact steps, as far as known.

        Infinity if it offloads tensors where files are in memory.
        """
        trial = self.largest_trial(strategy)
        if trial.contexts.host_bytes and self._seconds_of_byte(trial) is None:
            return math.inf
        error = self._costs[strategy].error or 0.0
        return self.seconds_of(strategy) / self._seconds[BLOCKS] - 1 + self._weight * error

    def seconds_of(self, strategy: Strategy) -> float:
        """Return the time of a step on the whole graph, in seconds.

        It is extrapolated from trials of an exact strategy, since codes take longer on small parts.
        Layers that run again take at most as long as forward.
        """
        if strategy.level not in QUANTIZING and not strategy.offloaded:
            return self._seconds[strategy]
        trial = self.largest_trial(strategy)
        seconds = self._seconds[BLOCKS if BLOCKS in self._seconds else STOCK]
        if strategy.config(self._config).recompute:
            seconds += self._pace * trial.forward_seconds / trial.share
        return seconds + sum(tensor.seconds for tensor in self.tensors_of(strategy))

    @property
    def _weight(self) -> float:
        return _WEIGHTS[self._prefer or "time"]

    def _widest(self, coded: Strategy) -> Strategy | None:
        """Return the most bits with which a strategy that quantizes all tensors fits."""
        self._fits(coded)
        bits = range(MOST_BITS, LEAST_BITS - 1, -1)
        return next(filter(self._fits, (coded._replace(bits=b) for b in bits)), None)

    @property
    def _is_small(self) -> bool:
        """Whether stock PyG saves so little for backward that compression is not worth its time."""
        return self._costs[STOCK].saved.at(1.0) < MIN_BYTES

    def _fits(self, strategy: Strategy) -> bool:
        """Return whether a strategy fits the budget; for one that quantizes, with some bits."""
        if strategy not in self._costs:
            self._find_cost(_tried_for(strategy))
        return self._is_kept(self._costs[strategy].peak)

    def estimate(self) -> Estimate:
        """Return the estimate by the costs known so far."""
        uniform = [s for s in strategies() if s in self._costs]
        costs = {s: self._costs[s] for s in (*uniform, *self._costs)}
        return Estimate(costs, self.size, self._memory, self.standing)

    def peaks_of(self, strategy: Strategy) -> Sequence[Peak]:
        """Return the peak of each part of a step, without :attr:`standing`."""
        return self._costs[strategy].peaks

    def largest_trial(self, strategy: Strategy) -> Trial:
        """Return the trial of a strategy on the largest part, or of the same with fewer bits."""
        return self._largest[_tried_for(strategy)]

    def tensors_of(self, strategy: Strategy) -> list[PlannedTensor]:
        """Return the saved tensors of a strategy on the whole graph."""
        trial, widths = self.largest_trial(strategy), dict(strategy.widths)
        sensitivities, of_element = self.sensitivities, seconds_of_element(self.device)
        away = trial.contexts.host_bytes
        of_byte = (self._seconds_of_byte(trial) if away else None) or 0.0
        tensors = []
        for row in trial.contexts.contexts:
            bits = widths.get(row.slot, strategy.bits) if row.bits is not None else None
            sensitivity = sensitivities.get(row.slot, 0.0)
            tensors.append(
                PlannedTensor.of(row, bits, sensitivity, trial.share, of_element, of_byte)
            )
        return tensors

    def _seconds_of_byte(self, trial: Trial) -> float | None:
        """Return the seconds to offload and fetch a byte of those of a trial; None if they stay."""
        return seconds_of_byte(self.device, trial.contexts.host_bytes / trial.share)

    @property
    def sensitivities(self) -> dict[str, float]:
        """The sensitivity of each slot, as far as they were measured."""
        trial = self._largest.get(self._coded[0])
        return {} if trial is None else trial.sensitivities

    @property
    def standing(self) -> int:
        """Bytes that any strategy takes: the state of the optimizer, and libraries."""
        return _MOMENTS * self._parameters + self._grown()

    def _may_fit(self, strategy: Strategy) -> bool:
        """Return whether a strategy may fit, by steps that measure nothing."""
        if strategy not in self._hopeless:
            share = self._share_after(self._first, self._second / 4)
            trial = self._trial(
                strategy, share, replace(self._config, adaptive=False, bits=LEAST_BITS)
            )
            self._hopeless[strategy] = self._is_hopeless(trial)
            if self._hopeless[strategy]:
                self._add_cost(strategy, trial, trial)
        return not self._hopeless[strategy]

    def _find_cost(self, strategy: Strategy) -> None:
        """Find the cost of a strategy; if it quantizes, for all numbers of bits."""
        self._add_cost(strategy, *self._pair(strategy))

    def _pair(self, strategy: Strategy, anyway: bool = False) -> tuple[Trial, Trial]:
        """Return the trials of a strategy on two parts, or on one if that shows it does not fit.

        Args:
            strategy: The strategy.
            anyway: Whether to try the larger part even so.
        """
        low = self._run(strategy, self._share_after(self._first, self._second / 4))
        if self._is_hopeless(low) and not anyway:
            return low, low
        second = self._second
        if strategy == STOCK:
            second = min(second, max(2 * low.share, _MOST_OF_STOCK))
        return low, self._run(strategy, self._share_after(low, second))

    def _add_cost(self, strategy: Strategy, low: Trial, high: Trial) -> None:
        """Extrapolate two trials of a strategy to its cost."""
        peaks, saved = self._peaks(low, high), _line(low, high, "saved")
        if strategy == STOCK:
            self._fixed = max(*(peak.line.fixed for peak in peaks), self._parameters) + _FIXED
        self._seconds[strategy] = self._pace * _line(low, high, "seconds").at(1.0)
        self._largest[strategy] = high
        self._costs[strategy] = Cost(peaks, saved, 0.0 if strategy.bits == 32 else None)
        if strategy.bits < 32 and not strategy.widths:
            element = _line(low, high, "coded")
            sensitivity = sum(high.sensitivities.values()) if high.sensitivities else None
            for bits in range(LEAST_BITS, MOST_BITS + 1):
                more = element.times((bits - LEAST_BITS) / 8)
                wider = [peak._replace(line=peak.line.plus(more)) for peak in peaks]
                error = None if sensitivity is None else sensitivity * noise(bits)
                self._costs[strategy._replace(bits=bits)] = Cost(wider, saved.plus(more), error)

    def _peaks(self, low: Trial, high: Trial) -> list[Peak]:
        """Return the peak of each part of a strategy's steps."""
        if not high.steps or not all(map(alike, low.steps, high.steps)):
            fixed = min(self._parameters, high.peak)  # gradients; other bytes may all grow
            return [Peak("", True, Line(fixed, (high.peak - fixed) / high.share))]
        return [
            Peak(b.slot, b.released, Line.through(a.peak, b.peak, (low.share, high.share)))
            for one, two in zip(low.steps, high.steps, strict=True)
            for a, b in zip(one.moments, two.moments, strict=True)
        ]

    def _mixed(self, coded: Strategy) -> Strategy | None:
        """Return the strategy that costs least in time and error among those that fit.

        Bisection takes the same way for all budgets up to where one of two fits and the other does
        not, so more memory never means a strategy that costs more.
        """
        exact = BLOCKS if coded == self._coded[0] else coded._replace(bits=32)
        if exact != BLOCKS and self._fits(exact):
            return exact
        if not self._config.adaptive:
            return None
        exact_pair, coded_pair = (self._pair(s, anyway=True) for s in (exact, coded))
        self._add_cost(exact, *exact_pair)
        self._add_cost(coded, *coded_pair)
        weight = self._weight * self._seconds[exact]
        mixed = Mixed.of((exact, exact_pair), (coded, coded_pair), weight, self.device)
        if mixed is None:
            return None

        def fits(rung: int) -> bool:
            strategy = mixed.strategy(rung)
            trial = self._largest[strategy] = self._run(strategy, mixed.share)
            self._costs[strategy] = mixed.corrected(rung, trial)
            return self._fits(strategy)

        least, most = 0, len(mixed.rungs)
        if not most or not fits(least):
            return None
        while most - least > 1:
            middle = (least + most) // 2
            least, most = (middle, most) if fits(middle) else (least, middle)
        return mixed.strategy(least)

    def _is_hopeless(self, trial: Trial) -> bool:
        """Return whether a single trial shows that a strategy does not fit."""
        growing = max(0.0, trial.peak - self._fixed)
        is_kept = self._is_kept(trial.peak - growing + growing / trial.share)
        return self._prefer is not None and not is_kept

    def _is_kept(self, peak: float) -> bool:
        return Estimate.budget_for(self.standing + peak) <= (self._memory or 0)

    def _share_of(self, nodes: int, edges: int) -> float:
        return max(edges / max(1, self.size.edges), nodes / max(1, self.size.nodes))

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
        if self.device.type != "cpu" or self._resident is None:
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
            self._copy = TrainedCopy(
                self._model, self._method, strategy, config, is_planned=self._prefer is not None
            )
        own = self._miniature.size
        inputs = self._miniature.shrunk(
            share * self.size.nodes / max(1, own.nodes),
            share * self.size.edges / max(1, own.edges),
        )
        try:
            trial = self._copy.train(inputs, share)
        except Exception as error:  # a model may check its inputs in any way
            if is_out_of_memory(error):
                raise
            reason = f"{type(error).__name__}: {error}".splitlines()[0]
            raise CannotShrink(f"a graph of which no part can be used: {reason}") from error
        self._parameters = self._copy.parameter_bytes  # lazy parameters are initialized by now
        return trial


def _tried_for(strategy: Strategy) -> Strategy:
    """Return the strategy whose trials have the contexts of a strategy."""
    is_uniform = strategy.bits < 32 and not strategy.widths
    return strategy._replace(bits=LEAST_BITS) if is_uniform else strategy


def _line(low: Trial, high: Trial, name: str) -> Line:
    sizes = getattr(low, name), getattr(high, name)
    return Line.through(*sizes, (low.share, high.share))
