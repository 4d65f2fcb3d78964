"""Advice for a CUDA device that is out of memory."""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from gact_graph.api.budget.estimate import STOCK, Estimate, Strategy
from gact_graph.api.budget.trials import estimate_call
from gact_graph.api.forward import CompressedForward
from gact_graph.api.report import format_bytes
from gact_graph.capture.config import Config
from gact_graph.support.torch_private import tree_map


class Advice:
    """Name a strategy that fits a call which ran out of memory, in forward or in backward.

    The autograd graph holds the advice, which therefore keeps no model and no input alive.

    Args:
        patch: The patch of the method that was called.
        module: The module of the method.
        before: Bytes of the device that were in use before the call.
        args: The positional arguments of the call.
        kwargs: The named arguments of the call.
    """

    def __init__(
        self, patch: CompressedForward, module: nn.Module, before: int, args: Any, kwargs: Any
    ) -> None:
        self._before = before
        self._called = weakref.ref(patch), weakref.ref(module)
        self._inputs = tree_map(_weakly, (args, kwargs))

    def __call__(self) -> str:
        """Return the advice, a sentence."""
        try:
            return self._advice()
        except Exception:  # only the error of the call counts: inputs may be gone, memory full
            return "wrap(model, memory=...) chooses a strategy that fits."

    def _advice(self) -> str:
        patch, module = (_alive(reference) for reference in self._called)
        inputs = tree_map(lambda reference: reference(), self._inputs)
        device = next(module.parameters()).device
        room = torch.cuda.get_device_properties(device).total_memory - self._before
        config = patch.controller.config
        shared = patch.first.settings
        estimate = estimate_call(module, patch.attribute, inputs, shared, max(1, room))
        failed = round(estimate.peak_of(_strategy_of(config, estimate)))
        # Absolute numbers may be wrong, but their order is reliable: no advice is above the failed.
        memory = min(room, failed)
        strategy = estimate.within(memory).choose()
        free = f"the {format_bytes(room)} that were free"
        if strategy is None:
            none = f"fits into {free}" if memory == room else "takes clearly less than this one"
            return f"no strategy {none}; {estimate.smallest_as_text()}."
        if memory == room:
            effect = f"would fit into {free}"
        else:
            peak = format_bytes(round(estimate.peak_of(strategy)))
            effect = f"takes about {peak}, and this strategy {format_bytes(failed)}"
        return f"{strategy.name} {effect}: wrap(model, memory={memory})."


def _strategy_of(config: Config, estimate: Estimate) -> Strategy:
    """Return the strategy with these settings; STOCK if there is no estimate for it."""
    bits = math.ceil(config.bits) if config.quantize else 32
    strategy = Strategy(config.level, bits, blocks=config.block_size is not None)
    return strategy if strategy in estimate.strategies else STOCK


def _weakly(value: Any) -> Callable[[], Any]:
    """Return a function that returns the value without keeping it alive."""
    try:
        reference = weakref.ref(value)
    except TypeError:  # numbers and strings
        return lambda: value
    return lambda: _alive(reference)


def _alive(reference: weakref.ref[Any]) -> Any:
    value = reference()
    if value is None:
        raise ReferenceError
    return value
