"""The state that a piece of Python code depends on: compared between calls, watched and put back.

From a function or a module the search follows attributes, variables of enclosing functions, class
attributes and globals, by the names that the code contains. Code of installed packages is trusted
to depend on the attributes that it names and on nothing else.
"""

from __future__ import annotations

import argparse
import enum
import functools
import io
import pickle
import random
import sys
import types
from collections import deque
from collections.abc import Callable, Container, Hashable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy
import torch
from torch import Tensor, nn
from torch_geometric.nn import MessagePassing

from gact_graph.support.storage import version_of

_EDGE_METHODS = frozenset({"message", "aggregate", "update", "edge_update"})
_ALL_METHODS = _EDGE_METHODS | {"forward"}

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
"""Modules of the standard library whose functions give the same result at every call."""

_IMPURE_BUILTINS = frozenset({"eval", "exec", "input", "open", "print"})
_DYNAMIC = frozenset(
    {"__dict__", "eval", "exec", "getattr", "globals", "locals", "setattr", "vars"}
)
"""Names in code that may read attributes by names that the code does not contain."""

_NAMESPACES = types.SimpleNamespace | argparse.Namespace
"""Objects of libraries that are followed, beside modules and containers."""

_MODULE_INTERNALS = frozenset(vars(nn.Module())) - {"training"}
_PLAIN = (
    *(bool, int, float, complex, str, bytes, type(None)),
    *(torch.dtype, torch.device, torch.layout, torch.memory_format, torch.Size, enum.Enum, slice),
)
_MODULE_CONTAINERS = (
    nn.ModuleList | nn.Sequential | nn.ModuleDict | nn.ParameterList | nn.ParameterDict
)
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
"""The parts of these."""

_MANY = 1000
"""Objects, and items of a container, above which the search ends."""

_COPIED_BYTES = 1 << 18
"""Tensors and arrays up to this size get their values back."""

_State = dict[Any, Any]
"""The content of an object, by names or numbers."""


class Unknowable(Exception):
    """Code reaches an object whose state cannot be compared or put back; the message says which."""


class Reach:
    """All that the code of some objects reaches.

    Args:
        roots: Modules, functions and other values.
        methods: The methods of the first root that run; those of other modules are ``forward``.
            None: all methods of all modules that message passing calls.
        own: The ids of objects whose changes belong to whoever runs the code.

    Attributes:
        tensors: Each tensor that is reached, once, with the path that leads to it.

    Raises:
        Unknowable: The code reaches an iterator, an open file, a source of randomness outside of
            torch, or a function of the standard library that may give another result each time.
    """

    def __init__(
        self,
        roots: Sequence[Any],
        methods: frozenset[str] | None = None,
        own: Container[int] = frozenset(),
    ) -> None:
        self._own = own
        self._root = roots[0]
        self._methods = methods
        code = _code_of(roots[0]), methods
        self._names: frozenset[str] = _known_names.get(
            code, _ALL_METHODS if methods is None else methods
        )
        while True:  # code that is met later may contain further names
            before = self._names
            self._search(roots)
            if self._names == before:
                break
        _known_names[code] = self._names

    def _search(self, roots: Sequence[Any]) -> None:
        self.tensors: list[tuple[str, Tensor]] = []
        self._objects: list[tuple[Any, str]] = []
        self._key: list[Any] = []
        self._numbers: dict[int, int] = {}
        self._held: list[Any] = []  # so that ids stay their own
        self._next: deque[tuple[Any, str]] = deque()
        for root in roots:
            self._refer(root, "")
        while self._next:
            if len(self._numbers) > _MANY:
                if self._methods is None:
                    break
                raise Unknowable(f"reaches more than {_MANY} objects")
            value, name = self._next.popleft()
            self._objects.append((value, name))
            self._visit(value, name)

    @property
    def key(self) -> Hashable:
        """Equal for two states in which the code does the same, values of tensors aside."""
        return tuple(self._key)

    def watch(self) -> Watch:
        """Remember the state of all objects that are reached, to see and undo changes."""
        return Watch(self._objects, self._names, self._own)

    def _refer(self, value: Any, name: str) -> None:
        """Add a value to the key: a plain one by value, another one by the number of its object."""
        if isinstance(value, _PLAIN):
            plain: Any = value
            if isinstance(value, slice):
                plain = value.start, value.stop, value.step
            self._key.append((type(value), plain))
            return
        number = self._numbers.get(id(value))
        if number is None:
            number = self._numbers[id(value)] = len(self._numbers)
            self._held.append(value)
            self._next.append((value, name))
        self._key.append(number)

    def _refer_all(self, values: Mapping[Any, Any], name: str) -> None:
        for key, value in values.items():
            self._key.append(key if isinstance(key, _PLAIN) else type(key))
            self._refer(value, _joined(name, key))

    def _visit(self, value: Any, name: str) -> None:
        kind: Any = type(value)
        self._key.append(kind)
        if isinstance(value, Tensor):
            self.tensors.append((name, value))
            self._key.append(_described(value))
        elif isinstance(value, types.ModuleType):
            self._key.append(value.__name__)
            if not _of_library(value.__name__):
                self._refer_all(self._named(vars(value)), name)
            elif self._strict and _may_change(value.__name__):
                raise Unknowable(f"calls functions of the module {value.__name__}")
        elif isinstance(value, type):
            self._key.append(value)
            for base in value.__mro__:
                if not _of_library(base.__module__):
                    self._refer_all(self._named(vars(base)), base.__name__)
        elif isinstance(value, types.FunctionType):
            self._visit_function(value, name)
        elif isinstance(value, types.CellType):
            self._refer_all(_contents(value), name)
        elif isinstance(value, _CALLS):
            self._key.append(getattr(value, "__name__", None))
            if isinstance(value, types.MethodType):
                self._names |= {value.__func__.__name__}
            for part in _PARTS:
                self._refer(getattr(value, part, None), name)
        elif isinstance(value, numpy.ndarray):
            if value.nbytes > _COPIED_BYTES and self._strict:
                raise Unknowable(f"reads {name}, an array that is too large to be compared")
            self._key.append((value.dtype.str, value.shape, value.tobytes()))
        elif isinstance(value, random.Random | torch.Generator) or hasattr(value, "_bit_generator"):
            if self._strict:
                raise Unknowable(f"reads {name}, a generator of random numbers")
        elif isinstance(value, Iterator | io.IOBase) and _of_library(kind.__module__):
            raise Unknowable(f"reads {name}, an iterator or an open file")
        elif isinstance(value, nn.Module):
            self._visit_module(value, name)
        elif isinstance(value, _CONTAINERS):
            self._refer(kind, name)
            self._refer_all(self._named(getattr(value, "__dict__", {})), name)
            if len(value) <= _MANY:
                self._refer_all(_items(value), name)
            elif self._strict:
                raise Unknowable(f"reads {name}, which has more than {_MANY} items")
        elif isinstance(value, _NAMESPACES) or not _of_library(kind.__module__):
            if callable(value):
                self._names |= {"__call__"}
            self._refer(kind, name)
            self._refer_all(self._named(attributes(value)), name)
        elif isinstance(value, torch.jit.ScriptFunction):
            if self._strict:
                raise Unknowable(f"calls {name}, which lives in TorchScript")
        elif isinstance(value, Hashable):
            self._key.append(value)

    @property
    def _strict(self) -> bool:
        """Whether equal keys must mean that the code does the same."""
        return self._methods is not None

    def _visit_function(self, function: types.FunctionType, name: str) -> None:
        variables = zip(function.__code__.co_freevars, function.__closure__ or (), strict=True)
        for variable, cell in variables:
            self._refer(cell, variable)
        for default in (*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values()):
            self._refer(default, function.__name__)
        if _of_library(function.__module__):
            self._key.append(function.__qualname__)
            if function.__name__ == "<lambda>":
                self._key.append(function.__code__)
            return
        self._key.append(function.__code__)
        names = _names_of(function.__code__)
        self._names |= names
        self._refer_all(self._named(vars(function)), function.__name__)
        world = function.__globals__
        for key in sorted(names & world.keys()):
            self._key.append(key)
            self._refer(world[key], key)
        impure = sorted((names & _IMPURE_BUILTINS) - world.keys())
        if impure and self._strict:
            raise Unknowable(f"calls {impure[0]}")

    def _visit_module(self, module: nn.Module, name: str) -> None:
        kind = type(module)
        if isinstance(module, torch.jit.ScriptModule) and self._strict:
            raise Unknowable(f"calls {name}, which lives in TorchScript")
        if self._methods is not None:
            is_root = module is self._root and isinstance(module, MessagePassing)
            entries = frozenset() if is_root else frozenset({"forward"})
            self._names |= _names_of_methods(kind, entries | self._names)
            if not is_root:
                self._refer_hooks(module, name)
        self._refer(kind, name)
        held = attributes(module)
        others = {k: v for k, v in held.items() if k not in _MODULE_INTERNALS}
        self._refer_all(self._named(others), name)
        if not self._strict:  # a layer of a library may hold a function of the user's to call
            calls = types.FunctionType | _CALLS
            self._refer_all({k: v for k, v in others.items() if isinstance(v, calls)}, name)
        for group in ("_parameters", "_buffers", "_modules"):
            inside = held.get(group, {})
            everything = isinstance(module, _MODULE_CONTAINERS) or (
                not self._strict and group == "_modules"
            )
            self._refer_all(inside if everything else self._named(inside), name)

    def _refer_hooks(self, module: nn.Module, name: str) -> None:
        """Refuse hooks of the user's, which would run in a trace and never again."""
        for group in ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks"):
            for hook in vars(module).get(group, {}).values():
                if not type(hook).__module__.startswith("gact_graph."):
                    raise Unknowable(f"has a hook on its module {name}")

    def _named(self, held: Mapping[str, Any]) -> dict[str, Any]:
        """The entries that the code may read."""
        if self._strict and not self._names.isdisjoint(_DYNAMIC):
            return {k: v for k, v in held.items() if not (k.startswith("__") and k.endswith("__"))}
        return {name: held[name] for name in held if name in self._names}


class _Record(NamedTuple):
    """An object: the path to it, its state at first, and how to read and restore the state."""

    name: str
    before: _State
    read: Callable[[], _State]
    restore: Callable[[_State], Any]


class Watch:
    """The state of some objects as it was when this was made."""

    def __init__(
        self, objects: Sequence[tuple[Any, str]], names: frozenset[str], own: Container[int]
    ) -> None:
        self._names, self._own = names, own
        self._records: list[_Record] = []
        for value, name in objects:
            self._add(value, name)

    def undo(self) -> str | None:
        """Put back changes made since; return the name of one of them, or None."""
        first = None
        for record in self._records:
            now = record.read()
            changed = [*_changed(now, record.before)]
            if changed:
                record.restore(record.before)
                first = first or _joined(record.name, changed[0])
        return first

    def _add(self, value: Any, name: str) -> None:
        if isinstance(value, types.ModuleType):
            if not _of_library(value.__name__):
                self._add_names(value, lambda: vars(value), name)
        elif isinstance(value, type):
            for kind in value.__mro__:
                if not _of_library(kind.__module__):
                    self._add_names(kind, functools.partial(vars, kind), kind.__name__)
        elif isinstance(value, types.FunctionType):
            if not _of_library(value.__module__):
                self._add_names(value, lambda: vars(value), value.__name__)
                self._add_names(value.__globals__, lambda: value.__globals__, "")
        elif isinstance(value, types.CellType):
            self._record(value, name, lambda: _contents(value), lambda old: _fill(value, old))
        elif (numbers := _numbers(value)) is not None:
            self._record(value, name, *numbers)
        elif isinstance(value, nn.Module | _CONTAINERS | _NAMESPACES) or not _of_library(
            type(value).__module__
        ):
            self._add_object(value, name)

    def _add_object(self, value: Any, name: str) -> None:
        self._add_names(value, lambda: attributes(value), name)
        if isinstance(value, nn.Module):
            for group in ("_parameters", "_buffers", "_modules"):
                held = vars(value).get(group, {})
                self._add_names(held, functools.partial(dict, held), name)
        fixed = isinstance(value, tuple | frozenset)
        if isinstance(value, _CONTAINERS) and len(value) <= _MANY and not fixed:
            self._record(value, name, lambda: _items(value), lambda old: _refill(value, old))

    def _add_names(self, owner: Any, read: Callable[[], Mapping[str, Any]], name: str) -> None:
        """Record the objects that the names in the code stand for in a mapping."""

        def state() -> _State:
            held = read()
            return {key: held[key] for key in self._names if key in held}

        self._record(owner, name, state, lambda old: _put_back(owner, state(), old))

    def _record(
        self, value: Any, name: str, read: Callable[[], _State], restore: Callable[[_State], Any]
    ) -> None:
        if id(value) not in self._own:
            self._records.append(_Record(name, read(), read, restore))


_known_names: dict[Any, frozenset[str]] = {}
"""The names that code contains, by the class or code where the search began."""


def _code_of(root: Any) -> Any:
    while isinstance(root, functools.partial):
        root = root.func
    root = getattr(root, "__func__", root)
    return getattr(root, "__code__", type(root))


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


@functools.lru_cache(maxsize=1024)
def _may_change(module: str) -> bool:
    """Whether functions of a module of the standard library may give other results each time."""
    top = module.partition(".")[0]
    return top in sys.stdlib_module_names and top not in _PURE


@functools.lru_cache(maxsize=1024)
def _code_names(kind: Any) -> dict[str, frozenset[str]]:
    """For each method of a module's class, the names in its code."""
    methods: dict[str, frozenset[str]] = {}
    for base in kind.__mro__:
        if base is not nn.Module:
            for name, value in vars(base).items():
                if isinstance(value, types.FunctionType):
                    methods[name] = methods.get(name, frozenset()) | _names_of(value.__code__)
    return methods


def _names_of_methods(kind: Any, names: frozenset[str]) -> frozenset[str]:
    """The names in the code of those methods of a module's class that have one of these names."""
    methods = _code_names(kind)
    return frozenset().union(*(methods[name] for name in names & methods.keys()))


def _described(tensor: Tensor) -> Hashable:
    """The properties of a tensor that decide what code does with it, its values aside."""
    strides = tensor.stride() if tensor.layout is torch.strided else None
    return tensor.dtype, tensor.device, tensor.shape, strides, tensor.requires_grad
