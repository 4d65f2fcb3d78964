"""What to do about a CUDA device that is out of memory."""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_map

from gact_graph.api.budget.estimate import STOCK, Estimate, Way
from gact_graph.api.budget.trials import estimate_call
from gact_graph.api.forward import CompressedForward
from gact_graph.api.report import format_bytes
from gact_graph.capture.config import Config


class Advice:
    """Names the way that would have fitted a call which ran out of memory, there or in backward.

    The graph holds it until backward, so it keeps nothing alive.

    Args:
        patch: Of the method that was called.
        module: Its module.
        before: Bytes of the device that were taken when the call began.
        args: Of the call.
        kwargs: Of the call.
    """

    def __init__(
        self, patch: CompressedForward, module: nn.Module, before: int, args: Any, kwargs: Any
    ) -> None:
        self._before = before
        self._called = weakref.ref(patch), weakref.ref(module)
        self._inputs = tree_map(_weakly, (args, kwargs))

    def __call__(self) -> str:
        """The advice, in a sentence."""
        try:
            return self._found()
        except Exception:  # The call's own error counts. Such as: inputs are gone, memory is full.
            return "wrap(model, memory=...) chooses a way to train that fits."

    def _found(self) -> str:
        patch, module = (_alive(one) for one in self._called)
        inputs = tree_map(lambda one: one(), self._inputs)
        device = next(module.parameters()).device
        room = torch.cuda.get_device_properties(device).total_memory - self._before
        config = patch.controller.config
        found = estimate_call(module, patch.attribute, inputs, config, max(1, room))
        failed = round(found.peak_of(_way_of(config, found)))
        # An estimate may be wrong, but it orders the ways: what failed, and what is larger, is out.
        memory = min(room, failed)
        way = found.within(memory).choose()
        free = f"the {format_bytes(room)} that were free"
        if way is None:
            none = f"fits into {free}" if memory == room else "takes clearly less than this one"
            return f"no way to train {none}; {found.smallest_as_text()}."
        if memory == room:
            where = f"would fit into {free}"
        else:
            peak = format_bytes(round(found.peak_of(way)))
            where = f"takes about {peak}, and this way {format_bytes(failed)}"
        return f"{way.name} {where}: wrap(model, memory={memory})."


def _way_of(config: Config, found: Estimate) -> Way:
    """The way with these settings; if it is none that was estimated, the model as it is."""
    bits = math.ceil(config.bits) if config.quantize else 32
    way = Way(config.level, bits, blocks=config.block_size is not None)
    return way if way in found.ways else STOCK


def _weakly(value: Any) -> Callable[[], Any]:
    """Gives a value that this does not keep alive."""
    try:
        reference = weakref.ref(value)
    except TypeError:  # numbers and texts
        return lambda: value
    return lambda: _alive(reference)


def _alive(reference: weakref.ref[Any]) -> Any:
    value = reference()
    if value is None:
        raise ReferenceError("it is gone")
    return value
