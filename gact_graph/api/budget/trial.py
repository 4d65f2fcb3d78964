"""Training steps of a copy of the model in one way, to see what they take."""

from __future__ import annotations

import copy
import gc
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from gact_graph.api.budget.measuring import measuring
from gact_graph.api.budget.ways import Way
from gact_graph.api.install import install, patch_of, remove
from gact_graph.capture.config import Config
from gact_graph.support.run_state import RunState
from gact_graph.support.storage import tensors_in


@dataclass(frozen=True)
class Trial:
    """What the steps took.

    Attributes:
        peaks: Of each step, the most at once in bytes, over what was there before it; its gradients
            count.
        raw_bytes: What stock autograd would have saved; None where the model was not wrapped.
        saved_bytes: What was saved in its place.
        seconds: Of a step.
    """

    peaks: tuple[int, ...]
    raw_bytes: int | None
    saved_bytes: int | None
    seconds: float

    @property
    def peak_bytes(self) -> int:
        """The highest of them."""
        return max(self.peaks)


class Subject:
    """A method of a model to try, of which copies run.

    Args:
        model: The module; its parameters may have no values yet.
        method: The method's name.
        config: The settings that all ways share.
    """

    def __init__(self, model: nn.Module, method: str, config: Config) -> None:
        self._model = model
        self._method = method
        self._config = config
        self.device = next(model.parameters()).device

    def run(self, way: Way, inputs: tuple[Any, Any], blocks: float = 1.0) -> Trial:
        """Trains a copy for some steps, which include those that measure sensitivities.

        All of them count: the first step, which puts the edges in order and tries layers out, may
        take more than those after it. Sensitivities are measured in the second and the third.

        Args:
            way: How.
            inputs: Positional and named arguments of the method.
            blocks: The share of its edges that a block has.

        Raises:
            RuntimeError: The system does not tell how much memory the process has.
        """
        gc.collect()  # a tensor that dies of age inside would lower what the step seems to take
        with warnings.catch_warnings(), measuring(self.device) as peak_of, self._copy() as model:
            warnings.simplefilter("ignore")  # about a way that training may never go
            patch = None
            if way.level is not None:
                settings = vars(self._config) | way.options | {"min_bytes": 0}
                patch = install(model, Config(**settings), (self._method,))
                if patch.controller.blocks is not None:
                    patch.controller.blocks.share = blocks
            peaks, seconds = [], []
            for _ in range(3 if way.bits < 32 else 2):
                model.zero_grad(set_to_none=True)
                start = time.perf_counter()
                peaks.append(peak_of(lambda: self._step(model, inputs)))
                seconds.append(time.perf_counter() - start)
            report = None if patch is None else patch.controller.report
            return Trial(
                tuple(peaks),
                None if report is None else report.raw_bytes,
                None if report is None else report.stored_bytes,
                min(seconds),
            )

    def _step(self, model: nn.Module, inputs: tuple[Any, Any]) -> None:
        args, kwargs = inputs
        model.zero_grad(set_to_none=True)
        losses = [_loss(t) for t in tensors_in(getattr(model, self._method)(*args, **kwargs))]
        torch.stack([loss for loss in losses if loss is not None]).sum().backward()
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    @contextmanager
    def _copy(self) -> Iterator[nn.Module]:
        """A copy that is not wrapped. The random states return on exit."""
        state = RunState({self.device.type})
        model = copy.deepcopy(self._model)
        patch = patch_of(model)
        if patch is not None:
            remove(patch.first)
        for module in model.modules():
            _forget_graph(module)
        try:
            with torch.enable_grad():
                yield model.train()
        finally:
            state.restore_random_state()


def _forget_graph(module: nn.Module) -> None:
    """What PyG's layers remember of one graph does not fit another."""
    for name in [*vars(module)]:
        if name.startswith("_cached_"):
            setattr(module, name, None)


def _loss(output: Tensor) -> Tensor | None:
    """A loss that takes about the memory that one for classes does."""
    if not output.requires_grad:
        return None
    if output.dim() == 2 and output.size(1) > 1:
        output = output.log_softmax(dim=-1)
    return output.float().mean()
