"""What to do about a CUDA device that is out of memory."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_map

from gact_graph.api.budget.estimate import Estimate
from gact_graph.api.budget.miniature import GraphSize
from gact_graph.api.budget.trying import estimate_call
from gact_graph.api.forward import CompressedForward
from gact_graph.api.report import format_bytes


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
        way = found.choose()
        if way is not None:
            return (
                f"{way.name} would fit into the {format_bytes(room)} that were free: "
                f"wrap(model, memory={room})."
            )
        return (
            f"no way to train fits into the {format_bytes(room)} that were free; "
            f"{smallest_way(found)}."
        )


def smallest_way(found: Estimate, size: GraphSize | None = None) -> str:
    """Which way has the lowest peak, and what that is, as a clause.

    Args:
        found: What is known of the ways.
        size: Of another graph than that of the estimate.
    """
    way, peak = found.smallest(size)
    return f"the smallest, {way.name}, takes {format_bytes(round(peak))}"


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
