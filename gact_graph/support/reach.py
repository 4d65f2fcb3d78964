"""What the code of a module reaches beside the module, so that a change of it is seen and undone.

A replica keeps to itself what its code sets in a module or in a container that a module holds. An
object in an attribute, the variables of an enclosing function, a class and a module's globals are
the user's own: what code that runs on trial, or for each block, does to them must not stay.
"""

from __future__ import annotations

import argparse
import functools
import io
import pickle
import random
import sys
import types
from collections import deque
from collections.abc import Callable, Container, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy
import torch
from torch import Tensor, nn

from gact_graph.support.storage import version_of

_METHODS = frozenset({"forward", "message", "aggregate", "update", "edge_update"})
"""Methods of a module that run in a replica."""

_LIBRARIES = sys.stdlib_module_names | {"gact_graph", "numpy", "torch", "torch_geometric"}
_INSTALLED = frozenset({"site-packages", "dist-packages"})
"""Names of the folders of installed packages, which need not be those of this environment."""

_NAMESPACES = types.SimpleNamespace | argparse.Namespace
"""The objects of libraries that are followed, beside modules and containers."""

_PLAIN = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device)
_CONTAINERS: Any = list | dict | set | deque | tuple | frozenset
_CALLS: Any = (
    types.MethodType
    | types.BuiltinMethodType
    | types.MethodWrapperType
    | staticmethod
    | classmethod
    | property
    | functools.partial
)
_PARTS = ("__self__", "__func__", "fget", "fset", "func", "args", "keywords")
"""What these are made of."""

_MANY = 1000
"""Objects, and items of a container, above which nobody looks further."""

_COPIED_BYTES = 1 << 18
"""Tensors and arrays up to this size get their values back."""

_State = dict[Any, Any]
"""What an object holds, by names or numbers."""


class Unknowable(Exception):
    """Code reaches something whose state cannot be read and put back; gives its name."""


class _Record(NamedTuple):
    """An object: how code reaches it, its state at first, and what reads and restores its state."""

    name: str
    before: _State
    read: Callable[[], _State]
    restore: Callable[[_State], Any]


class Reach:
    """The state of all that the code of a module reaches, as it was when this was made.

    Followed are attributes, variables and globals, by the names that the code contains, from the
    methods of the module's class and of its submodules' classes that are not of a library.

    Args:
        module: The module; one that runs a function that it does not hold has that in ``code``.
        own: The ids of objects whose changes stay with the module: these are followed only.

    Raises:
        Unknowable: The code reaches an iterator or an open file.
    """

    def __init__(self, module: nn.Module, own: Container[int]) -> None:
        self._own = own
        self._names = _METHODS
        known = 0
        while len(self._names) > known:  # code that is found later may contain others
            known = len(self._names)
            self._records: list[_Record] = []
            self._seen: dict[int, Any] = {}  # held, so that ids stay their own
            self._next: deque[tuple[Any, str]] = deque([(module, "")])
            self._follow([getattr(module, "code", None)], "")
            while self._next and len(self._seen) < _MANY:
                value, name = self._next.popleft()
                if id(value) not in self._seen:
                    self._seen[id(value)] = value
                    self._visit(value, name)

    def undo(self) -> str | None:
        """Puts back what has changed since; gives the name of one such thing, or None."""
        found = None
        for record in self._records:
            now = record.read()
            changed = [*_changed(now, record.before)]
            if changed:
                record.restore(record.before)
                found = found or _joined(record.name, changed[0])
        return found

    def _follow(self, values: Iterable[Any], name: str) -> None:
        self._next.extend((value, name) for value in values if not isinstance(value, _PLAIN))

    def _record(
        self, value: Any, name: str, read: Callable[[], _State], restore: Callable[[_State], Any]
    ) -> None:
        if id(value) not in self._own:
            self._records.append(_Record(name, read(), read, restore))

    def _visit(self, value: Any, name: str) -> None:
        if isinstance(value, types.ModuleType):
            if not _of_library(value.__name__):
                self._add_names(value, lambda: vars(value), name)
        elif isinstance(value, type):
            for kind in value.__mro__:
                if not _of_library(kind.__module__):
                    self._add_names(kind, functools.partial(vars, kind), kind.__name__)
        elif isinstance(value, types.FunctionType):
            self._add_function(value)
        elif isinstance(value, types.CellType):
            self._record(value, name, lambda: _contents(value), lambda old: _fill(value, old))
            self._follow(_contents(value).values(), name)
        elif isinstance(value, _CALLS):
            self._follow((getattr(value, part, None) for part in _PARTS), name)
        elif (numbers := _numbers(value)) is not None:
            self._record(value, name, *numbers)
        elif isinstance(value, Iterator | io.IOBase) and _of_library(type(value).__module__):
            raise Unknowable(name)
        elif isinstance(value, nn.Module | _CONTAINERS | _NAMESPACES) or not _of_library(
            type(value).__module__
        ):
            self._add_object(value, name)

    def _add_object(self, value: Any, name: str) -> None:
        self._follow([type(value)], name)
        self._add_names(value, lambda: attributes(value), name)
        if isinstance(value, nn.Module):
            for group in ("_parameters", "_buffers", "_modules"):
                held = vars(value).get(group, {})
                self._add_names(held, functools.partial(dict, held), name)
            # A layer of a library may hold a module or a function of the user's to call.
            inside = [v for v in vars(value).values() if isinstance(v, types.FunctionType | _CALLS)]
            self._follow([*inside, *vars(value).get("_modules", {}).values()], name)
        elif isinstance(value, _CONTAINERS) and len(value) <= _MANY:
            if not isinstance(value, tuple | frozenset):
                self._record(value, name, lambda: _items(value), lambda old: _refill(value, old))
            self._follow(_items(value).values(), name)

    def _add_function(self, function: types.FunctionType) -> None:
        variables = zip(function.__code__.co_freevars, function.__closure__ or (), strict=True)
        self._next.extend((cell, name) for name, cell in variables)
        self._follow(function.__defaults__ or (), function.__name__)
        self._follow((function.__kwdefaults__ or {}).values(), function.__name__)
        if not _of_library(function.__module__):
            self._names |= _names_of(function.__code__)
            self._add_names(function, lambda: vars(function), function.__name__)
            self._add_names(function.__globals__, lambda: function.__globals__, "")

    def _add_names(self, owner: Any, read: Callable[[], Mapping[str, Any]], name: str) -> None:
        """What the names in the code mean in what ``read`` gives of ``owner``."""

        def state() -> _State:
            held = read()
            return {key: held[key] for key in self._names if key in held}

        self._record(owner, name, state, lambda old: _put_back(owner, state(), old))
        for key, value in state().items():
            self._follow([value], _joined(name, key))


def attributes(value: Any) -> dict[str, Any]:
    """What the ``__dict__`` and the ``__slots__`` of an object hold."""
    held: dict[str, Any] = getattr(value, "__dict__", {})
    kind: Any = type(value)
    slots = slots_of(kind)
    return held | {n: getattr(value, n) for n in slots if hasattr(value, n)} if slots else held


@functools.lru_cache(maxsize=1024)  # a library may make classes as it goes
def slots_of(kind: Any) -> tuple[str, ...]:
    """The slots of a class and of those that it inherits from."""
    found: list[str] = []
    for one in kind.__mro__:
        slots = vars(one).get("__slots__", ())
        found += (slots,) if isinstance(slots, str) else slots
    return tuple(name for name in found if name not in ("__dict__", "__weakref__"))


def _numbers(value: Any) -> tuple[Callable[[], _State], Callable[[_State], Any]] | None:
    """What reads and restores the state of a tensor, an array or a random number generator."""
    if isinstance(value, Tensor):
        copy = value.detach().clone() if value.nbytes <= _COPIED_BYTES else value.detach()
        return lambda: {None: version_of(value)}, lambda _: value.data.copy_(copy)
    if isinstance(value, numpy.ndarray):
        if value.nbytes > _COPIED_BYTES:
            return dict, lambda _: None
        array = value.copy()
        return lambda: {None: value.tobytes()}, lambda _: numpy.copyto(value, array)
    if isinstance(value, torch.Generator):
        state = value.get_state()
        return lambda: {None: bytes(value.get_state())}, lambda _: value.set_state(state)
    if isinstance(value, random.Random):
        now = value.getstate()
        return lambda: {None: repr(value.getstate())}, lambda _: value.setstate(now)
    if hasattr(value, "_bit_generator"):  # NumPy's
        bits = value._bit_generator
        return lambda: {None: pickle.dumps(bits.state)}, lambda old: setattr(
            bits, "state", pickle.loads(old[None])
        )
    return None


def _contents(cell: types.CellType) -> _State:
    """What a variable of an enclosing function holds: nothing before it is assigned."""
    try:
        return {None: cell.cell_contents}
    except ValueError:
        return {}


def _fill(cell: types.CellType, contents: _State) -> None:
    del cell.cell_contents
    for content in contents.values():
        cell.cell_contents = content


def _items(container: Any) -> _State:
    return dict(container) if isinstance(container, dict) else dict(enumerate(container))


def _refill(container: Any, items: _State) -> None:
    container.clear()
    if isinstance(container, dict):
        container.update(items)
    elif isinstance(container, set):
        container.update(items.values())
    else:
        container.extend(items.values())


def _put_back(owner: Any, now: _State, before: _State) -> None:
    """Sets the names of an object, a class or a dictionary to what they were."""
    how: Any = type if isinstance(owner, type) else object
    for key in now.keys() - before.keys():
        if isinstance(owner, dict):
            del owner[key]
        else:
            how.__delattr__(owner, key)
    for key in {*_changed(now, before)} & before.keys():
        if isinstance(owner, dict):
            owner[key] = before[key]
        else:
            how.__setattr__(owner, key, before[key])


def _changed(now: _State, before: _State) -> Iterator[Any]:
    """The names whose objects differ; numbers and strings are compared by value."""
    for key in now.keys() | before.keys():
        if key not in now or key not in before:
            yield key
        elif now[key] is not before[key]:
            plain = isinstance(now[key], _PLAIN) and type(now[key]) is type(before[key])
            if not plain or now[key] != before[key]:
                yield key


@functools.lru_cache(maxsize=1024)
def _names_of(code: types.CodeType) -> frozenset[str]:
    """The names in a function's code and in that of functions inside it; strings, for getattr."""
    names = {*code.co_names}
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            names |= _names_of(constant)
        elif isinstance(constant, str) and constant.isidentifier():
            names.add(constant)
    return frozenset(names)


@functools.lru_cache(maxsize=1024)
def _of_library(module: str | None) -> bool:
    """Whether a module of this name is Python's own or is installed: its code is not followed."""
    top = (module or "sys").partition(".")[0]
    file = getattr(sys.modules.get(top), "__file__", None)
    return top in _LIBRARIES or (file is not None and not _INSTALLED.isdisjoint(Path(file).parts))


def _joined(name: str, key: Any) -> str:
    if not isinstance(key, str):
        return name
    return f"{name}.{key}" if name else key
