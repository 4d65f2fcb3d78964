"""Training steps of a copy of a model on parts of a graph, and their peak memory."""

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

from gact_graph.api.budget.estimate import Strategy
from gact_graph.api.controller import Controller
from gact_graph.api.install import install, patch_of, remove
from gact_graph.capture.config import Config
from gact_graph.ops.allocations import watching_allocations
from gact_graph.support.memory.policy import memory_policy
from gact_graph.support.peak import PeakMeter, resident_bytes
from gact_graph.support.run_state import RunState
from gact_graph.support.storage import parts_of, tensors_in

_LEAST_BLOCK = 1 / 256
"""The least share of the usual edges of a block, for small parts of the graph."""


@dataclass(frozen=True)
class Trial:
    """The memory of training steps on a part of the graph, in bytes.

    Attributes:
        share: The part, as a share of the graph.
        held: The inputs.
        peak: The peak above the memory in use before, including gradients.
        raw: The tensors that stock autograd would save.
        saved: The tensors saved in their place.
        coded: The number of quantized elements.
    """

    share: float
    held: int
    peak: int
    raw: int = 0
    saved: int = 0
    coded: int = 0


class TrainedCopy:
    """A copy of a model that trains with one strategy, on one part of the graph after another.

    Parameters and attributes of the copy are restored after each part; analyses of its layers are
    kept.

    Attributes:
        settings: The strategy, and the settings that all strategies share.
    """

    def __init__(
        self, original: nn.Module, method: str, strategy: Strategy, config: Config
    ) -> None:
        self.settings = strategy, config
        self._method = method
        self._model = model = copy.deepcopy(original).train()
        self._device = next(model.parameters()).device
        patch = patch_of(model)
        if patch is not None:
            remove(patch.first)
        for module in model.modules():
            for name in [*vars(module)]:
                if name.startswith("_cached_"):  # PyG's layers cache results for the whole graph
                    setattr(module, name, None)
        # Sensitivities are measured in the first step, and bits follow them in the second.
        self._steps = 2 if strategy.bits < 32 and config.adaptive else 1
        self._controller: Controller | None = None
        if strategy.level is not None:
            self._controller = install(model, strategy.config(config), (method,)).controller
        self._attributes = [(module, dict(vars(module))) for module in model.modules()]

    @property
    def parameter_bytes(self) -> int:
        """The size of the parameters that require a gradient."""
        return sum(p.nbytes for p in self._model.parameters() if p.requires_grad)

    def train(self, inputs: tuple[Any, Any], share: float) -> Trial:
        """Train for one or two steps.

        Args:
            inputs: Positional and named arguments of the method, for a part of the graph.
            share: The part, as a share of the graph.
        """
        state = RunState({self._device.type})
        try:
            with torch.enable_grad(), warnings.catch_warnings():
                warnings.simplefilter("ignore")  # training may never use this strategy
                return self._train(inputs, share)
        finally:
            state.restore_random_state()
            self._forget()
            gc.collect()
            memory_policy.release(self._device)

    def _train(self, inputs: tuple[Any, Any], share: float) -> Trial:
        controller = self._controller
        if controller is not None and controller.blocks is not None:
            controller.blocks.share = max(share, _LEAST_BLOCK)
        held = sum(part.nbytes for t in tensors_in(inputs) for part in parts_of(t))
        with watching_peak(self._device) as peak_bytes:
            for _ in range(self._steps):
                self._step(*inputs)
            peak = peak_bytes()
        if controller is None:
            return Trial(share, held, peak)
        report = controller.report
        coded = sum(row.numel for row in report.contexts if row.codec == "quantize")
        return Trial(share, held, peak, report.raw_bytes, report.stored_bytes, coded)

    def _step(self, args: Any, kwargs: Any) -> None:
        self._model.zero_grad(set_to_none=True)
        outputs = tensors_in(getattr(self._model, self._method)(*args, **kwargs))
        losses = [_loss(output) for output in outputs if output.requires_grad]
        torch.stack(losses).sum().backward()

    def _forget(self) -> None:
        self._model.zero_grad(set_to_none=True)
        for module, attributes in self._attributes:
            vars(module).clear()
            vars(module).update(attributes)
        if self._controller is not None:
            self._controller.forget()


@contextmanager
def undisturbed(device: torch.device) -> Iterator[None]:
    """Leave no memory of trials behind, and keep garbage collection fast inside the context.

    Reference cycles of trials would otherwise settle between the objects of the training.
    """
    gc.collect()
    with ExitStack() as stack:
        stack.callback(memory_policy.release, device)
        stack.callback(gc.collect)
        if not gc.get_freeze_count():  # objects that the user has frozen remain frozen
            gc.freeze()
            stack.callback(gc.unfreeze)
        if device.type == "cpu":
            stack.enter_context(memory_policy.limited())
        yield


@contextmanager
def watching_peak(device: torch.device) -> Iterator[Callable[[], int]]:
    """Yield a function that returns the peak in bytes since the context was entered.

    On a CPU the peak is that of torch's allocator if it can be watched, or of the resident set.

    Raises:
        RuntimeError: If the memory of the process is unknown.
    """
    with ExitStack() as stack:
        if device.type == "cpu":
            watch = stack.enter_context(watching_allocations())
            if watch is not None:
                yield watch
                return
            if resident_bytes() is None:
                raise RuntimeError(
                    "Expected a system that reports the memory of a process in /proc, such as "
                    "Linux (got none); pass bits=, level= and blocks= in place of memory="
                )
        meter = stack.enter_context(PeakMeter(device))
        before = torch.cuda.memory_allocated(device) if device.type == "cuda" else 0
        yield lambda: (meter.peak_bytes or 0) - before


def _loss(output: Tensor) -> Tensor:
    """Return a scalar that takes about as much memory as a classification loss."""
    if output.dim() == 2 and output.size(1) > 1:
        output = output.log_softmax(dim=-1)
    return output.float().mean()
