"""The parts of Python objects: attributes, items, variables, and names in their code."""

from __future__ import annotations

import argparse
import dis
import enum
import functools
import random
import sys
import types
from collections import deque
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy
import torch
from torch import nn

PLAIN = (
    *(bool, int, float, complex, str, bytes, type(None)),
    *(torch.dtype, torch.device, torch.layout, torch.memory_format, torch.Size, enum.Enum, slice),
)
"""Classes of immutable values."""

CONTAINERS: Any = list | dict | set | deque | tuple | frozenset

NAMESPACES = types.SimpleNamespace | argparse.Namespace
"""Objects of libraries that are followed, beside modules and containers."""

GENERATORS = (random.Random, torch.Generator, numpy.random.Generator, numpy.random.RandomState)
"""Generators of random numbers."""

MODULE_INTERNALS = frozenset(vars(nn.Module())) - {"training"}

MANY = 1000
"""Objects, and items of a container, above which the search ends."""

COPIED_BYTES = 1 << 18
"""The most bytes of a tensor or an array whose values are restored."""

State = dict[Any, Any]
"""The contents of an object, by names or numbers."""

_LIBRARIES = sys.stdlib_module_names | {"gact_graph", "numpy", "torch", "torch_geometric"}
_INSTALLED = frozenset({"site-packages", "dist-packages"})
"""Names of the folders of installed packages, which need not be those of this environment."""

_SCRIPTS = frozenset({"__main__", "__mp_main__"})

_PURE = frozenset(
    {
        *("abc", "builtins", "cmath", "collections", "contextlib", "copy", "dataclasses", "enum"),
        *("functools", "inspect", "itertools", "math", "numbers", "operator", "string", "types"),
        *("typing", "warnings", "weakref"),
    }
)
"""Modules of the standard library whose functions return the same result at every call."""

_OF_VALUES = frozenset({"datetime", "decimal", "fractions", "pathlib", "re", "uuid"})
"""Modules of the standard library whose objects do not change."""

DYNAMIC = frozenset(
    {
        *("eval", "exec", "getattr", "globals", "hasattr", "locals", "setattr", "vars"),
        *("__dict__", "__getattr__", "__getattribute__"),
        *("children", "named_children", "modules", "named_modules", "get_submodule"),
        *("parameters", "named_parameters", "buffers", "named_buffers", "state_dict"),
        *("get_parameter", "get_buffer", "_modules", "_parameters", "_buffers"),
    }
)
"""Names in code that may read or write attributes by names that the code does not contain."""

HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
"""The attributes in which a module holds hooks on its calls."""

CONSTRUCTORS = ("__new__", "__init__")
TEXTS = ("__repr__", "__str__")

_NOT_BY_OPERATORS = frozenset(
    {
        *(*CONSTRUCTORS, *TEXTS, "__del__", "__sizeof__", "__dir__"),
        *("__reduce__", "__reduce_ex__", "__getstate__", "__setstate__", "__copy__"),
        *("__deepcopy__", "__init_subclass__", "__class_getitem__", "__set_name__"),
    }
)


def is_plain_value(value: Any) -> bool:
    """Return whether an object is immutable and compared by value.

    Instances of a user's subclasses may have attributes and methods of their own.
    """
    return isinstance(value, PLAIN) and is_library(type(value).__module__)


def attributes(value: Any) -> dict[str, Any]:
    """Return the contents of the ``__dict__`` and the ``__slots__`` of an object."""
    held: dict[str, Any] = getattr(value, "__dict__", {})
    kind: Any = type(value)
    slots = slots_of(kind)
    return held | {n: getattr(value, n) for n in slots if hasattr(value, n)} if slots else held


@functools.lru_cache(maxsize=1024)  # libraries may create classes at run time
def slots_of(kind: Any) -> tuple[str, ...]:
    """Return the slots of a class and of its bases."""
    names: list[str] = []
    for base in kind.__mro__:
        slots = vars(base).get("__slots__", ())
        owner = base.__name__.lstrip("_")
        for name in (slots,) if isinstance(slots, str) else slots:
            private = owner and name.startswith("__") and not name.endswith("__")
            names.append(f"_{owner}{name}" if private else name)  # as Python mangles it
    return tuple(name for name in names if name not in ("__dict__", "__weakref__"))


def module_attributes(module: nn.Module) -> dict[str, Any]:
    """Return the attributes of a module, without those that every module has, but ``training``."""
    return {k: v for k, v in attributes(module).items() if k not in MODULE_INTERNALS}


def named(held: Mapping[str, Any], names: frozenset[str]) -> dict[str, Any]:
    """Return the entries that code with these names may read or write."""
    if names.isdisjoint(DYNAMIC):
        return {name: held[name] for name in held if name in names}
    return {
        name: value
        for name, value in held.items()
        if name in names or not (name.startswith("__") and name.endswith("__"))
    }


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


@functools.lru_cache(maxsize=1024)
def names_of(code: types.CodeType) -> frozenset[str]:
    """Return the names in a function's code and in nested functions; strings too, for getattr."""
    names = {*code.co_names}
    if any(operation.opname.startswith("FORMAT_") for operation in dis.get_instructions(code)):
        names.add("format")  # f-strings
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            names |= names_of(constant)
        elif isinstance(constant, str):
            parts = constant.split(".")  # for attrgetter
            names |= {*parts} if all(map(str.isidentifier, parts)) else set()
    return frozenset(names)


@functools.lru_cache(maxsize=1024)
def imports_of(code: types.CodeType) -> tuple[tuple[str, int], ...]:
    """Return the modules that a function's code and nested functions import: name and level."""
    found: dict[tuple[str, int], None] = {}
    loaded: list[Any] = []
    for operation in dis.get_instructions(code):
        if operation.opname == "IMPORT_NAME":
            found[operation.argval, loaded[-2]] = None  # after the level and the names are loaded
        elif operation.opname.startswith("LOAD_"):
            loaded.append(operation.argval)
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            found |= dict.fromkeys(imports_of(constant))
    return tuple(found)


def names_of_methods(kind: Any, names: frozenset[str]) -> frozenset[str]:
    """Return the names in the code of those methods of a module's class that have these names."""
    methods = _methods_of(kind)
    return frozenset().union(*(methods[name] for name in names & methods.keys()))


@functools.lru_cache(maxsize=1024)
def _methods_of(kind: Any) -> dict[str, frozenset[str]]:
    methods: dict[str, frozenset[str]] = {}
    for base in kind.__mro__:
        if base is not nn.Module:
            for name, value in vars(base).items():
                if isinstance(value, types.FunctionType):
                    methods[name] = methods.get(name, frozenset()) | names_of(value.__code__)
    return methods


@functools.lru_cache(maxsize=1024)
def special_methods_of(kind: Any) -> frozenset[str]:
    """Return the methods of a user's class that operators and statements call without a name."""
    return frozenset(
        name
        for base in kind.__mro__
        if not is_library(base.__module__)
        for name, value in vars(base).items()
        if name.startswith("__") and name.endswith("__") and isinstance(value, types.FunctionType)
    ).difference(_NOT_BY_OPERATORS)


@functools.lru_cache(maxsize=1024)
def is_library(module: str | None) -> bool:
    """Return whether a module is Python's own or installed, so that its code is not followed."""
    top = ("sys" if module is None else module).partition(".")[0]
    if top in _SCRIPTS:
        return False  # though its file may be that of a package which starts workers
    file = getattr(sys.modules.get(top), "__file__", None)
    return top in _LIBRARIES or (file is not None and not _INSTALLED.isdisjoint(Path(file).parts))


def home_of(function: types.FunctionType) -> str:
    """Return the module of a function's code, also if ``functools.wraps`` names another one.

    Code that ``exec`` runs may have no module: it is that of the user.
    """
    return function.__globals__.get("__name__") or ""


@functools.lru_cache(maxsize=1024)
def is_standard(module: str) -> bool:
    """Return whether a module belongs to the standard library."""
    return module.partition(".")[0] in sys.stdlib_module_names


@functools.lru_cache(maxsize=1024)
def is_impure(module: str) -> bool:
    """Return whether functions of a module of the standard library may vary between calls."""
    return is_standard(module) and module.partition(".")[0] not in _PURE


@functools.lru_cache(maxsize=1024)
def is_stateful(module: str) -> bool:
    """Return whether objects of a module of the standard library may change."""
    # Parts in C have a module of their own, such as _collections.
    top = module.partition(".")[0].removeprefix("_")
    return is_standard(module) and top not in _PURE | _OF_VALUES
