"""The parts of Python objects: attributes, items, and variables of enclosing functions."""

from __future__ import annotations

import argparse
import enum
import functools
import types
from collections import deque
from typing import Any

import torch
from torch import nn

PLAIN = (
    *(bool, int, float, complex, str, bytes, type(None)),
    *(torch.dtype, torch.device, torch.layout, torch.memory_format, torch.Size, enum.Enum, slice),
)
"""Immutable values, which are compared by value."""

CONTAINERS: Any = list | dict | set | deque | tuple | frozenset

NAMESPACES = types.SimpleNamespace | argparse.Namespace
"""Objects of libraries that are followed, beside modules and containers."""

MODULE_INTERNALS = frozenset(vars(nn.Module())) - {"training"}

MANY = 1000
"""Objects, and items of a container, above which the search ends."""

COPIED_BYTES = 1 << 18
"""The most bytes of a tensor or an array whose values are put back."""

State = dict[Any, Any]
"""The contents of an object, by names or numbers."""


def attributes(value: Any) -> dict[str, Any]:
    """Return the contents of the ``__dict__`` and the ``__slots__`` of an object."""
    held: dict[str, Any] = getattr(value, "__dict__", {})
    kind: Any = type(value)
    slots = slots_of(kind)
    return held | {n: getattr(value, n) for n in slots if hasattr(value, n)} if slots else held


@functools.lru_cache(maxsize=1024)  # a library may make classes as it goes
def slots_of(kind: Any) -> tuple[str, ...]:
    """Return the slots of a class and of its bases."""
    names: list[str] = []
    for base in kind.__mro__:
        slots = vars(base).get("__slots__", ())
        names += (slots,) if isinstance(slots, str) else slots
    return tuple(name for name in names if name not in ("__dict__", "__weakref__"))


def module_attributes(module: nn.Module) -> dict[str, Any]:
    """Return the attributes of a module, without those that every module has, but ``training``."""
    return {k: v for k, v in attributes(module).items() if k not in MODULE_INTERNALS}


def cell_contents(cell: types.CellType) -> State:
    """Return the variable of an enclosing function; nothing before it is assigned."""
    try:
        return {None: cell.cell_contents}
    except ValueError:
        return {}


def items(container: Any) -> State:
    """Return the items of a container by keys or numbers."""
    return dict(container) if isinstance(container, dict) else dict(enumerate(container))


def joined(name: str, key: Any) -> str:
    """Return the path of an attribute or item."""
    if not isinstance(key, str):
        return name
    return f"{name}.{key}" if name else key
