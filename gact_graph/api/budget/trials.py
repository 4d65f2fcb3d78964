"""Training steps of a copy of the model on parts of the graph, and what the whole takes by them.

A peak is the highest of several moments of a step, each of which grows with the graph along a
straight line. So the whole takes at least what the line through two parts says, and at most what
one part takes, divided by its share. Parts grow until the two are close.
"""

from __future__ import annotations

import copy
import gc
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

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
from gact_graph.api.install import install, patch_of, remove
from gact_graph.capture.config import Config
from gact_graph.ops.allocations import watching_allocations
from gact_graph.support.memory.policy import memory_policy
from gact_graph.support.peak import PeakMeter, resident_bytes
from gact_graph.support.run_state import RunState
from gact_graph.support.storage import parts_of, tensors_in

_EDGES, _NODES = 1 << 14, 1 << 10
"""Of the second part that is tried in each way; the first has a quarter."""

_FEW_EDGES, _FEW_NODES = 1 << 9, 1 << 6
"""Of the first part of all, when nothing is known of what it takes."""

_LEAST_BLOCK = 1 / 256
"""Of the edges of a block: the share that is left of it in the smallest parts. Of a graph of which
these are less than that, blocks take little."""

_MOMENTS = 2
"""What an optimizer is expected to hold, in tensors of a parameter's size."""

_STEPS = 2
"""Of a trial in which sensitivities are measured: in the first, and the second has their bits."""

_MOST = 0.5
"""The largest part that is tried."""

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
    with _undisturbed(next(model.parameters()).device):
        trials = _Trials(model, method, inputs, config, memory, nodes, edges)
        if not choosing:
            for way in (STOCK, LOSSLESS, BLOCKS, *trials.coded):
                trials.see(way)
        elif first is None or not trials.fits(first):
            trials.choose()
        return trials.estimate()


@dataclass(frozen=True)
class _Trial:
    """What steps on one part of the graph took, in bytes.

    Attributes:
        share: Of the graph.
        held: By the inputs.
        peak: The most at once over what was there before, gradients included.
        raw: What stock autograd would have saved.
        saved: What was saved in its place.
        coded: Elements that were quantized.
    """

    share: float
    held: int
    peak: int
    raw: int = 0
    saved: int = 0
    coded: int = 0


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
    ) -> None:
        self._model, self._method, self._config = model, method, config
        self._memory = memory
        self._miniature = Miniature(*inputs)
        self._given = self._miniature.size
        self._size = GraphSize(nodes or self._given.nodes, edges or self._given.edges)
        self._device = next(model.parameters()).device
        self._resident = resident_bytes()
        self._parameters = 0
        self._costs: dict[Way, Cost] = {}
        self._trials: dict[tuple[Way, float], _Trial] = {}
        self.coded = [Way(level, LEAST_BITS) for level in quantizing(self._device.type)]
        part = max(_EDGES / max(1, self._size.edges), _NODES / max(1, self._size.nodes))
        self._largest = min(_MOST, part)
        few = max(_FEW_EDGES / max(1, self._size.edges), _FEW_NODES / max(1, self._size.nodes))
        self._first = self._run(STOCK, min(self._largest / 8, few))

    def choose(self) -> None:
        """Sees no more ways than it takes to find the first that fits."""
        if self.fits(STOCK):
            return
        if self.fits(BLOCKS):
            self.see(LOSSLESS)
            return
        for way in self.coded:
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
        """Finds what a way takes; of one that quantizes, at all widths."""
        low = self._run(way, self._share_after(self._first, self._largest / 4))
        high = self._run(way, self._share_after(low, self._largest))
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

    def _is_enough(self, way: Way, low: _Trial, high: _Trial) -> bool:
        """Whether two trials say what the whole takes, or whether that fits."""
        least, most = _line(low, high, "peak").at(1.0), high.peak / high.share
        if self._memory is None or most <= _CLOSE * least:
            return most <= _CLOSE * least
        fits = Estimate.budget_for(self._standing + most) <= self._memory
        return (fits and way.bits == 32) or self._standing + least > self._memory

    def _share_after(self, trial: _Trial, wanted: float) -> float:
        """A share that keeps to the budget, by what another one has taken."""
        if self._memory is None:
            return wanted
        # The copy of the model and its gradients; half of the rest stays free.
        room = self._memory - self._grown() - (2 + _MOMENTS) * self._parameters
        taken = max(1, trial.held + trial.peak - self._parameters)
        return min(wanted, max(trial.share, room / 2 * trial.share / taken))

    def _grown(self) -> int:
        """What the process has loaded since the start."""
        if self._device.type != "cpu" or self._resident is None:
            return 0
        return max(0, (resident_bytes() or 0) - self._resident)

    def _run(self, way: Way, share: float) -> _Trial:
        """Trains a copy for some steps on a part of the graph, unless that has been done."""
        known = self._trials.get((way, share))
        if known is None:  # a small budget leaves room for no more than one share
            known = self._trials[way, share] = self._trial(way, share)
        return known

    def _trial(self, way: Way, share: float) -> _Trial:
        with _copy(self._model, self._device) as model, _watching(self._device) as peak_of:
            try:
                return self._train(model, way, share, peak_of)
            except _NO_PART as error:
                if isinstance(error, torch.OutOfMemoryError):
                    raise
                reason = f"{type(error).__name__}: {error}".splitlines()[0]
                raise CannotShrink(f"some of which no part will do: {reason}") from error

    def _train(
        self, model: nn.Module, way: Way, share: float, peak_of: Callable[[Callable[[], None]], int]
    ) -> _Trial:
        args, kwargs = self._miniature.shrunk(
            share * self._size.nodes / max(1, self._given.nodes),
            share * self._size.edges / max(1, self._given.edges),
        )
        held = sum(part.nbytes for t in tensors_in((args, kwargs)) for part in parts_of(t))
        patch = None
        if way.level is not None:
            settings = vars(self._config) | way.options | {"min_bytes": 0}
            patch = install(model, Config(**settings), (self._method,))
            if patch.controller.blocks is not None:
                patch.controller.blocks.share = max(share, _LEAST_BLOCK)

        def train() -> None:
            for _ in range(_STEPS if way.bits < 32 and self._config.adaptive else 1):
                model.zero_grad(set_to_none=True)
                outputs = tensors_in(getattr(model, self._method)(*args, **kwargs))
                losses = [_loss(out) for out in outputs if out.requires_grad]
                torch.stack(losses).sum().backward()

        model.zero_grad(set_to_none=True)
        peak = peak_of(train)
        # By now parameters that are initialised lazily have a size.
        self._parameters = sum(p.nbytes for p in model.parameters() if p.requires_grad)
        if patch is None:
            return _Trial(share, held, peak)
        report = patch.controller.report
        coded = sum(row.numel for row in report.contexts if row.codec == "quantize")
        return _Trial(share, held, peak, report.raw_bytes, report.stored_bytes, coded)


def _line(low: _Trial, high: _Trial, name: str) -> Line:
    """The line through two trials; nothing shrinks where the graph grows."""
    at_low, at_high = getattr(low, name), getattr(high, name)
    if high.share <= low.share:
        return Line(0.0, at_high / high.share)
    growing = max(0.0, (at_high - at_low) / (high.share - low.share))
    return Line(max(0.0, at_high - growing * high.share), growing)


@contextmanager
def _undisturbed(device: torch.device) -> Iterator[None]:
    """Freed tensors go back to the system inside, and collecting garbage takes little time.

    Trials leave cycles behind; what is left of them by the end would lie between the objects of the
    training to come.
    """
    gc.collect()
    is_ours = not gc.get_freeze_count()  # what the user has frozen stays so
    with ExitStack() as stack:
        stack.callback(memory_policy.give_back, device)
        stack.callback(gc.collect)
        if is_ours:
            gc.freeze()
            stack.callback(gc.unfreeze)
        if device.type == "cpu":
            stack.enter_context(memory_policy.limited())
        yield


@contextmanager
def _copy(original: nn.Module, device: torch.device) -> Iterator[nn.Module]:
    """A copy of a model that is not wrapped. The random states and its memory return on exit."""
    state = RunState({device.type})
    model = copy.deepcopy(original)
    patch = patch_of(model)
    if patch is not None:
        remove(patch.first)
    for module in model.modules():
        for name in [*vars(module)]:
            if name.startswith("_cached_"):  # of PyG's layers; another graph needs another one
                setattr(module, name, None)
    try:
        with torch.enable_grad(), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about a way that training may never go
            yield model.train()
    finally:
        state.restore_random_state()
        del model
        gc.collect()
        memory_policy.give_back(device)


@contextmanager
def _watching(device: torch.device) -> Iterator[Callable[[Callable[[], None]], int]]:
    """Yields a function that does a piece of work and returns its peak in bytes.

    On the CPU it counts what tensors take; where that cannot be told, the resident set.

    Raises:
        RuntimeError: The system does not tell how much memory the process has.
    """
    with ExitStack() as stack:
        watch = stack.enter_context(watching_allocations()) if device.type == "cpu" else None
        if device.type == "cpu" and watch is None and resident_bytes() is None:
            raise RuntimeError(
                "Expected a system that tells how much memory a process has, as Linux in /proc "
                "(got none); give bits=, level= and blocks= in place of memory="
            )

        def peak_of(work: Callable[[], None]) -> int:
            if watch is not None:
                watch.restart()
                work()
                return watch.most_bytes
            with PeakMeter(device, collect=False) as meter:
                before = meter.current_bytes() or 0
                work()
            return (meter.peak_bytes or 0) - before

        yield peak_of


def _loss(output: Tensor) -> Tensor:
    """A loss that takes about the memory that one for classes does."""
    if output.dim() == 2 and output.size(1) > 1:
        output = output.log_softmax(dim=-1)
    return output.float().mean()
