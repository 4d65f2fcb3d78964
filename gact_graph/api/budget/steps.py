"""Training steps of a copy of a model on parts of a graph, and their peak memory."""

from __future__ import annotations

import copy
import gc
import warnings
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from gact_graph.adaptive.agreement import alone
from gact_graph.api.budget.estimate import Strategy
from gact_graph.api.install import install, patch_of, remove
from gact_graph.api.report.contexts import Contexts
from gact_graph.capture.config import Config
from gact_graph.capture.moments import Moments
from gact_graph.capture.places import Places
from gact_graph.ops.allocations import Watch, watching_allocations
from gact_graph.support.clock import seconds_on
from gact_graph.support.memory.limits import is_out_of_memory
from gact_graph.support.memory.policy import memory_policy
from gact_graph.support.part import part_of_graph
from gact_graph.support.peak import PeakMeter, resident_bytes
from gact_graph.support.run_state import RunState, random_states, set_random_states
from gact_graph.support.storage import parts_of, tensors_held_by, tensors_in

_LEAST_SHARE = 1 / 256
"""The least share of the usual sizes of blocks and pieces: smaller ones take too long."""


@dataclass(frozen=True)
class Trial:
    """The memory of training steps on a part of the graph, in bytes.

    Attributes:
        share: The part, as a share of the graph.
        held: The inputs, apart from views of the whole graph's.
        peak: The peak above the memory in use before, including gradients.
        contexts: The saved tensors of the last step.
        steps: The record of each step.
        seconds: The duration of the last step.
        forward_seconds: The duration of its forward.
        places: The results that need no memory of their own, as far as they were found.
    """

    share: float
    held: int
    peak: int
    contexts: Contexts = field(default_factory=Contexts)
    steps: Sequence[Moments] = ()
    seconds: float = 0.0
    forward_seconds: float = 0.0
    places: Places = field(default_factory=Places)

    @property
    def saved(self) -> int:
        """The bytes of the saved tensors."""
        return self.contexts.stored_bytes

    @property
    def coded(self) -> int:
        """The number of quantized elements."""
        return sum(row.numel for row in self.contexts.contexts if row.bits is not None)

    @property
    def sensitivities(self) -> dict[str, float]:
        """The sensitivity of each slot; empty if none was measured."""
        rows = self.contexts.contexts
        return {row.slot: row.sensitivity for row in rows if row.sensitivity is not None}


class TrainedCopy:
    """A copy of a model that trains with one strategy, on one part of the graph after another.

    Parameters and attributes of the copy are restored after each part; analyses of its layers are
    kept.

    Args:
        original: The model.
        method: The name of the method that training calls.
        strategy: The strategy.
        config: The settings that all strategies share.
        is_planned: Whether the model will start with the results that need no memory of their own
            in the copy, as under a plan. If not, it finds them in its first step.

    Attributes:
        settings: The strategy, and the settings that all strategies share.
    """

    def __init__(
        self,
        original: nn.Module,
        method: str,
        strategy: Strategy,
        config: Config,
        is_planned: bool = False,
    ) -> None:
        self.settings: tuple[Strategy, Config] = strategy, config
        self._method = method
        states = random_states()  # PyG 2.6 draws weights for the copy of a Linear
        self._model = model = _copied(original).train()
        set_random_states(states)
        self._device = next(model.parameters()).device
        patch = patch_of(model)
        if patch is not None:
            remove(patch.first)
        for module in model.modules():
            for name in [*vars(module)]:
                if name.startswith("_cached_"):  # PyG's layers cache results for the whole graph
                    setattr(module, name, None)
            if isinstance(module, DistributedDataParallel):
                # Other ranks try other steps at other times, or none.
                module.require_backward_grad_sync = module.require_forward_param_sync = False
        # The first step measures sensitivities, and may find results that need no memory.
        self._steps = 2 if strategy.blocks else 1
        self._places: Places | None = None
        self._finds_places = is_planned and strategy.blocks
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
            with alone(), torch.enable_grad(), warnings.catch_warnings():
                warnings.simplefilter("ignore")  # training may never use this strategy
                return self._train(inputs, share)
        finally:
            state.restore_random_state()
            self._forget()
            gc.collect()
            memory_policy.release(self._device)

    def _train(self, inputs: tuple[Any, Any], share: float) -> Trial:
        controller = self._controller
        if self._finds_places and self._places is None:
            self._step(*inputs)
            self._places = copy.deepcopy(controller.methods[self._method].places)
            self._forget()
        if self._places is not None:
            controller.methods[self._method].places = self._places
        parts = [part for tensor in tensors_in(inputs) for part in parts_of(tensor)]
        held = sum(part.nbytes for part in parts if _owns_storage(part))
        steps: list[Moments] = []
        with watching(self._device) as watch, part_of_graph(max(share, _LEAST_SHARE)):
            for _ in range(self._steps):
                watch.mark()
                controller.moments = Moments(watch.mark)
                steps.append(controller.moments)
                try:
                    forward_seconds, seconds = self._step(*inputs)
                finally:
                    controller.moments.close()
                    controller.moments = None
            peak = watch.peak()
        contexts = Contexts(controller.report.contexts)
        places = copy.deepcopy(controller.methods[self._method].places)
        return Trial(share, held, peak, contexts, steps, seconds, forward_seconds, places)

    def _step(self, args: Any, kwargs: Any) -> tuple[float, float]:
        """Train for one step, and return the seconds of its forward and of the whole step."""
        self._model.zero_grad(set_to_none=True)
        start = seconds_on(self._device)
        outputs = tensors_in(getattr(self._model, self._method)(*args, **kwargs))
        forward_seconds = seconds_on(self._device) - start
        losses = [_loss(output) for output in outputs if output.requires_grad]
        if losses:
            torch.stack(losses).sum().backward()
        elif self.parameter_bytes:
            raise RuntimeError("no output of the model requires a gradient")
        return forward_seconds, seconds_on(self._device) - start

    def _forget(self) -> None:
        self._model.zero_grad(set_to_none=True)
        for module, attributes in self._attributes:
            vars(module).clear()
            vars(module).update(attributes)
        self._controller.forget()


def _copied(model: nn.Module) -> nn.Module:
    """Return a copy of a model, with leaves for results that it holds, such as the mean of VGAE.

    Raises:
        ValueError: If the model cannot be copied.
    """
    leaves = {
        id(tensor): tensor.detach().requires_grad_()
        for tensor in tensors_held_by(model)
        if tensor.grad_fn is not None
    }
    try:
        return copy.deepcopy(model, leaves)
    except Exception as error:  # a model may hold any object
        if is_out_of_memory(error):
            raise
        raise ValueError(
            "Expected a model that copy.deepcopy can copy, since a copy tries the training steps "
            f"(got {type(error).__name__}: {error}); define __deepcopy__ for the attribute, or "
            "pass bits=, level= and blocks= in place of memory="
        ) from error


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
def watching(device: torch.device) -> Iterator[Watch]:
    """Watch the bytes that are allocated inside the context.

    On a CPU they are those of torch's allocator if it can be watched, or of the resident set, where
    a mark ends no part: each part then counts with the peak so far.

    Raises:
        RuntimeError: If the memory of the process is unknown.
    """
    if device.type == "cuda":
        yield _watch_cuda(device)
        return
    with ExitStack() as stack:
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

        def peak() -> int:
            return meter.peak_bytes or 0

        yield Watch(peak, peak)


def _watch_cuda(device: torch.device) -> Watch:
    """Watch CUDA's allocator, whose peak is reset by each mark."""
    torch.cuda.reset_peak_memory_stats(device)
    before, most = torch.cuda.memory_allocated(device), 0

    def recent() -> int:
        return torch.cuda.max_memory_allocated(device) - before

    def mark() -> int:
        nonlocal most
        now = recent()
        most = max(most, now)
        torch.cuda.reset_peak_memory_stats(device)
        return now

    return Watch(lambda: max(most, recent()), mark)


def _owns_storage(tensor: Tensor) -> bool:
    return tensor.untyped_storage().nbytes() <= tensor.nbytes


def _loss(output: Tensor) -> Tensor:
    """Return a scalar that takes about as much memory as a classification loss."""
    if output.dim() == 2 and output.size(1) > 1:
        output = output.log_softmax(dim=-1)
    return output.float().mean()
