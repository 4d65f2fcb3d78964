"""The names in the code of functions, and the modules whose code is trusted."""

from __future__ import annotations

import functools
import sys
import types
from pathlib import Path
from typing import Any

from torch import nn

_LIBRARIES = sys.stdlib_module_names | {"gact_graph", "numpy", "torch", "torch_geometric"}
_INSTALLED = frozenset({"site-packages", "dist-packages"})
"""Names of the folders of installed packages, which need not be those of this environment."""

_PURE = frozenset(
    {
        *("abc", "builtins", "cmath", "collections", "contextlib", "copy", "dataclasses", "enum"),
        *("functools", "inspect", "itertools", "math", "numbers", "operator", "string", "types"),
        *("typing", "warnings", "weakref"),
    }
)
"""Modules of the standard library whose functions return the same result at every call."""


@functools.lru_cache(maxsize=1024)
def names_of(code: types.CodeType) -> frozenset[str]:
    """Return the names in a function's code and in nested functions; strings too, for getattr."""
    names = {*code.co_names}
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            names |= names_of(constant)
        elif isinstance(constant, str) and constant.isidentifier():
            names.add(constant)
    return frozenset(names)


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
def is_library(module: str | None) -> bool:
    """Return whether a module is Python's own or installed, so that its code is not followed."""
    top = (module or "sys").partition(".")[0]
    file = getattr(sys.modules.get(top), "__file__", None)
    return top in _LIBRARIES or (file is not None and not _INSTALLED.isdisjoint(Path(file).parts))


@functools.lru_cache(maxsize=1024)
def is_impure(module: str) -> bool:
    """Return whether functions of a module of the standard library may vary between calls."""
    top = module.partition(".")[0]
    return top in sys.stdlib_module_names and top not in _PURE
