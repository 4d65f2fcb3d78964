"""What a layer's doings depend on: its settings and modes, and the kinds of its arguments."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from types import FunctionType
from typing import Any, Generic, TypeVar

import torch
from torch import nn

from gact_graph.layers.blocks.arguments import Arguments

_MOST = 16
"""The most states that are remembered: some layers have a setting that changes at each call."""

_PLAIN = (bool, int, float, str, type(None), torch.dtype)

Found = TypeVar("Found")


class Known(Generic[Found]):
    """What was found out about a layer, by the state that it holds for. Copies start empty."""

    def __init__(self) -> None:
        self._found: dict[Hashable, Found] = {}

    def get(self, state: Hashable, find: Callable[[], Found]) -> Found:
        """What is known for this state; if nothing is, ``find`` finds it out."""
        if state not in self._found:
            found = find()
            while len(self._found) >= _MOST:
                del self._found[next(iter(self._found))]
            self._found[state] = found
        return self._found[state]

    def replace(self, old: Found, new: Found) -> None:
        """Puts ``new`` in place of ``old``, which turned out to be wrong."""
        for state, found in self._found.items():
            if found is old:
                self._found[state] = new

    def __getstate__(self) -> dict[str, Any]:
        return {"_found": {}}


def state_of(module: nn.Module, arguments: Arguments) -> Hashable:
    """What a layer's doings depend on, as far as it can be seen from outside.

    These are its settings and those of its submodules (such as ``training``), autocast, and the
    arguments: names, uses, types, shapes without the first dimension, and values of settings.
    """
    device = arguments.tensors[0].device.type
    whole = {use.index for use in arguments.uses if use.level == "whole"}
    return (
        (torch.is_autocast_enabled(device), torch.get_autocast_dtype(device)),
        arguments.uses,
        tuple(
            # For a tensor that is neither of nodes nor of edges: which dimensions are broadcast.
            (t.dtype, t.device, tuple(min(2, n) for n in t.shape) if i in whole else t.shape[1:])
            for i, t in enumerate(arguments.tensors)
        ),
        tuple(
            (name, value if isinstance(value, (bool, float, str)) else type(value))
            for name, value in sorted(arguments.others.items())
        ),
        tuple(_settings(part) for part in module.modules()),
    )


def _settings(module: nn.Module) -> Hashable:
    found: list[Any] = [type(module)]
    for name, value in vars(module).items():
        if name == "_compiled_call_impl":  # replicas have none
            continue
        if isinstance(value, _PLAIN):
            found.append((name, type(value), value))
        elif isinstance(value, FunctionType):
            found.append((name, id(value)))
        elif isinstance(value, (tuple, list)) and all(isinstance(v, _PLAIN) for v in value):
            found.append((name, *value))
    for name, parameter in module._parameters.items():
        found.append((name, None if parameter is None else parameter.dtype))
    return tuple(found)
