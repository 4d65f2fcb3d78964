"""Training steps of a copy of a model on parts of a graph, and the memory that they take."""

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

from gact_graph.api.budget.estimate import Way
from gact_graph.api.controller import Controller
from gact_graph.api.install import install, patch_of, remove
from gact_graph.capture.config import Config
from gact_graph.ops.allocations import watching_allocations
from gact_graph.support.memory.policy import memory_policy
from gact_graph.support.peak import PeakMeter, resident_bytes
from gact_graph.support.run_state import RunState
from gact_graph.support.storage import parts_of, tensors_in

_LEAST_BLOCK = 1 / 256
"""Of the edges of a block: the share that is left of it in the smallest parts. Of a graph of which
these are less than that, blocks take little."""

_STEPS = 2
"""Of a trial in which sensitivities are measured: in the first, and the second has their bits."""


@dataclass(frozen=True)
class Trial:
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


class TrainedCopy:
    """A copy of a model that trains in one way, on one part of its graph after another.

    Each part meets the model as it was. What was found out about its layers stays known.
    """

    def __init__(self, original: nn.Module, method: str, way: Way, config: Config) -> None:
        self.way = way
        self._method = method
        self._model = model = copy.deepcopy(original).train()
        self._device = next(model.parameters()).device
        patch = patch_of(model)
        if patch is not None:
            remove(patch.first)
        for module in model.modules():
            for name in [*vars(module)]:
                if name.startswith("_cached_"):  # of PyG's layers; another graph needs another one
                    setattr(module, name, None)
        self._steps = _STEPS if way.bits < 32 and config.adaptive else 1
        self._controller: Controller | None = None
        if way.level is not None:
            settings = vars(config) | way.options | {"min_bytes": 0}
            self._controller = install(model, Config(**settings), (method,)).controller
        self._attributes = [(module, dict(vars(module))) for module in model.modules()]

    @property
    def parameter_bytes(self) -> int:
        """The size of the parameters that need a gradient."""
        return sum(p.nbytes for p in self._model.parameters() if p.requires_grad)

    def train(self, inputs: tuple[Any, Any], share: float) -> Trial:
        """Train for some steps on inputs that hold a share of the graph."""
        state = RunState({self._device.type})
        try:
            with (
                torch.enable_grad(),
                warnings.catch_warnings(),
                watching_peak(self._device) as peak_of,
            ):
                warnings.simplefilter("ignore")  # about a way that training may never go
                return self._train(inputs, share, peak_of)
        finally:
            state.restore_random_state()
            self._forget()
            gc.collect()
            memory_policy.release(self._device)

    def _train(
        self, inputs: tuple[Any, Any], share: float, peak_of: Callable[[Callable[[], None]], int]
    ) -> Trial:
        args, kwargs = inputs
        controller = self._controller
        if controller is not None and controller.blocks is not None:
            controller.blocks.share = max(share, _LEAST_BLOCK)

        def steps() -> None:
            for _ in range(self._steps):
                self._model.zero_grad(set_to_none=True)
                outputs = tensors_in(getattr(self._model, self._method)(*args, **kwargs))
                losses = [_loss(out) for out in outputs if out.requires_grad]
                torch.stack(losses).sum().backward()

        held = sum(part.nbytes for t in tensors_in(inputs) for part in parts_of(t))
        peak = peak_of(steps)
        if controller is None:
            return Trial(share, held, peak)
        report = controller.report
        coded = sum(row.numel for row in report.contexts if row.codec == "quantize")
        return Trial(share, held, peak, report.raw_bytes, report.stored_bytes, coded)

    def _forget(self) -> None:
        self._model.zero_grad(set_to_none=True)
        for module, attributes in self._attributes:
            vars(module).clear()
            vars(module).update(attributes)
        if self._controller is not None:
            self._controller.forget()


@contextmanager
def undisturbed(device: torch.device) -> Iterator[None]:
    """Freed tensors go back to the system inside, and collecting garbage takes little time.

    Trials leave cycles behind; what is left of them by the end would lie between the objects of the
    training to come.
    """
    gc.collect()
    is_ours = not gc.get_freeze_count()  # what the user has frozen stays so
    with ExitStack() as stack:
        stack.callback(memory_policy.release, device)
        stack.callback(gc.collect)
        if is_ours:
            gc.freeze()
            stack.callback(gc.unfreeze)
        if device.type == "cpu":
            stack.enter_context(memory_policy.limited())
        yield


@contextmanager
def watching_peak(device: torch.device) -> Iterator[Callable[[Callable[[], None]], int]]:
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
            with PeakMeter(device) as meter:
                before = 0
                work()
            return (meter.peak_bytes or 0) - before

        yield peak_of


def _loss(output: Tensor) -> Tensor:
    """A loss that takes about the memory that one for classes does."""
    if output.dim() == 2 and output.size(1) > 1:
        output = output.log_softmax(dim=-1)
    return output.float().mean()
