"""The state that Python code depends on, to be compared between calls, recorded and restored.

From a function or a module the search follows attributes, variables of enclosing functions, class
attributes and globals, by the names that the code contains. Code of installed packages is trusted
to depend on the attributes that it names and on nothing else.
"""

from __future__ import annotations

import enum
import functools
import io
import logging
import operator
import sys
import threading
import types
import weakref
from collections import ChainMap, UserDict, UserList, deque
from collections.abc import Hashable, Iterator, Mapping, Sequence
from typing import Any

import numpy
import torch
from torch import Tensor, nn
from torch_geometric.data.data import BaseData
from torch_geometric.data.storage import BaseStorage
from torch_geometric.nn import MessagePassing
from torch_geometric.typing import SparseTensor

from gact_graph.support.objects import (
    CONSTRUCTORS,
    CONTAINERS,
    COPIED_BYTES,
    DYNAMIC,
    GENERATORS,
    HOOKS,
    MANY,
    NAMESPACES,
    PLAIN,
    TEXTS,
    attributes,
    cell_contents,
    home_of,
    imports_of,
    is_impure,
    is_library,
    is_plain_value,
    is_standard,
    is_stateful,
    items,
    joined,
    module_attributes,
    named,
    names_of,
    names_of_methods,
    special_methods_of,
)
from gact_graph.support.watch import Watch

_EDGE_METHODS = frozenset({"message", "aggregate", "update", "edge_update"})
_ALL_METHODS = _EDGE_METHODS | {"forward"}

_IMPURE_BUILTINS = frozenset({"eval", "exec", "input", "open", "print"})
_SEEDING = frozenset(
    {"manual_seed", "manual_seed_all", "seed_everything", "fork_rng", "set_rng_state"}
)
"""Functions that set random states. No graph repeats them."""

_MAKE_TEXT = frozenset({"ascii", "format", "repr", "str"})

_MODULE_CONTAINERS = (
    nn.ModuleList | nn.Sequential | nn.ModuleDict | nn.ParameterList | nn.ParameterDict
)
_WEAK: Any = weakref.WeakKeyDictionary | weakref.WeakValueDictionary | weakref.WeakSet
_WRAPPERS = UserDict | UserList | ChainMap | _WEAK | BaseData | BaseStorage
"""Objects whose attributes hold what the code reads by other names."""
_GETTERS: Any = operator.attrgetter | operator.methodcaller
_WRITE_ONLY = (logging.Logger, type(threading.Lock()), type(threading.RLock()))
"""Objects of the standard library that change without effect on the code that uses them."""
_VALUES = (numpy.generic, numpy.dtype, numpy.ufunc, SparseTensor)
"""Objects of installed packages that do not change."""
_CACHED = type(functools.lru_cache(len))
_CALLS: Any = (
    types.MethodType
    | types.BuiltinMethodType
    | types.MethodWrapperType
    | staticmethod
    | classmethod
    | property
    | types.DynamicClassAttribute
    | functools.partial
    | functools.partialmethod
    | functools.cached_property
    | functools.singledispatchmethod
)
_PARTS = ("__self__", "__func__", "fget", "fset", "func", "dispatcher", "args", "keywords")
"""The attributes that hold the parts of such callables."""


class Unknowable(Exception):
    """Code reaches an object, named in the message, whose state cannot be compared or restored."""


class Reach:
    """The objects that the code of root objects reaches.

    Args:
        roots: Modules, functions and other values.
        methods: The methods of the first root that run; those of other modules are ``forward``.
            If None, modules are reached with all of their attributes, random number generators are
            allowed, and :attr:`key` does not determine the behavior of the code; the search is
            for objects whose state a :class:`Watch` records.

    Attributes:
        tensors: Each tensor that is reached, once, with the path that leads to it.

    Raises:
        Unknowable: If the code reaches an iterator, an open file, other objects of the standard
            library that may change, or too many objects, items or numbers; if ``methods`` is not
            None, also a source of randomness outside of torch, or a function of the standard
            library with results that may differ between calls; else a root whose state is unknown.
    """

    def __init__(self, roots: Sequence[Any], methods: frozenset[str] | None = None) -> None:
        self._root = roots[0]
        self._methods = methods
        code = _code_of(roots[0]), methods
        self._names: frozenset[str] = _known_names.get(
            code, _ALL_METHODS if methods is None else methods
        )
        while True:  # code that is reached later may contain further names
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
            most = MANY if self._strict else 10 * MANY  # submodules with all of their attributes
            if len(self._numbers) > most:
                raise Unknowable(f"reaches more than {most} objects")
            value, name = self._next.popleft()
            self._objects.append((value, name))
            self._visit(value, name)

    @property
    def key(self) -> Hashable:
        """A key that is equal for states in which the code does the same, except for values."""
        return tuple(self._key)

    def watch(self, copied_bytes: float = COPIED_BYTES) -> Watch:
        """Record the state of all reached objects, to find and undo changes.

        Args:
            copied_bytes: The most bytes of a tensor that is copied.
        """
        return Watch(self._objects, self._names, not self._strict, copied_bytes)

    def _refer(self, value: Any, name: str, by_name: bool = True) -> None:
        """Add a value to the key: plain values themselves, others as numbers of objects.

        Args:
            value: The value.
            name: The path to it.
            by_name: Whether code reaches it, and may call it, rather than an instance of it.
        """
        if is_plain_value(value):
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
        if by_name and isinstance(value, type) and not issubclass(value, nn.Module):
            kind: Any = value
            self._names |= special_methods_of(kind)
            self._refer_methods(kind, CONSTRUCTORS)

    def _refer_methods(self, kind: type, names: Sequence[str]) -> None:
        """Refer to those methods of a user's class that run though the code does not name them."""
        for base in kind.__mro__:
            if not is_library(base.__module__):
                methods = {name: vars(base)[name] for name in names if name in vars(base)}
                self._refer_all(methods, base.__name__)

    def _refer_all(self, values: Mapping[Any, Any], name: str) -> None:
        for key, value in values.items():
            if type(key) in (str, int):
                self._key.append(key)
            else:
                self._refer(key, name)
            self._refer(value, joined(name, key))

    def _refer_kind(self, value: Any, name: str) -> None:
        """Refer to the class of an object, whose methods run."""
        kind: Any = type(value)
        self._names |= special_methods_of(kind)
        self._refer(kind, name, by_name=False)
        if not self._names.isdisjoint(_MAKE_TEXT):
            self._refer_methods(kind, TEXTS)

    def _visit(self, value: Any, name: str) -> None:
        kind: Any = type(value)
        shown = name or "an argument"
        self._key.append(kind)
        if isinstance(value, Tensor):
            self.tensors.append((name, value))
            self._key.append(_described(value))
            self._refer_all(self._named(vars(value), of_object=True), name)
        elif isinstance(value, types.ModuleType):
            self._key.append(value.__name__)
            if not is_library(value.__name__):
                held = vars(value)
                self._refer_all(self._named(held), name)
                self._refer(held.get("__getattr__"), name)  # called without its name
                self._refer(kind, name, by_name=False)
            elif self._strict and is_impure(value.__name__):
                raise Unknowable(f"calls functions of the module {value.__name__}")
        elif isinstance(value, type):
            self._key.append(value)
            if not is_library(kind.__module__):
                self._refer_kind(value, name)
            for base in value.__mro__:
                if not is_library(base.__module__):
                    self._refer_all(self._named(vars(base)), base.__name__)
        elif isinstance(value, types.FunctionType):
            self._visit_function(value)
        elif isinstance(value, types.CellType):
            for content in cell_contents(value).values():
                self._refer(content, name, by_name=name != "__class__")  # which super() reads
        elif isinstance(value, _CALLS):
            self._key.append(getattr(value, "__name__", None))
            if isinstance(value, types.MethodType):
                self._names |= {value.__func__.__name__}
            for part in _PARTS:
                self._refer(getattr(value, part, None), name)
        elif isinstance(value, numpy.ndarray):
            if value.nbytes > COPIED_BYTES:
                raise Unknowable(f"reads {shown}, an array that is too large to be compared")
            if self._strict:
                self._key.append((value.dtype.str, value.shape, value.tobytes()))
        elif isinstance(value, GENERATORS):
            if self._strict:
                raise Unknowable(f"reads {shown}, a generator of random numbers")
        elif isinstance(value, Iterator | io.IOBase) and is_library(kind.__module__):
            raise Unknowable(f"reads {shown}, an iterator or an open file")
        elif isinstance(value, nn.Module):
            self._visit_module(value, name)
        elif isinstance(value, CONTAINERS):
            self._refer_kind(value, name)
            held = getattr(value, "__dict__", {})
            self._refer_all(self._named(held, of_object=True), name)
            if len(value) > MANY:
                raise Unknowable(f"reads {shown}, which has more than {MANY} items")
            self._refer_all(items(value), name)
        elif isinstance(value, types.MappingProxyType):
            self._refer_all(value, name)
        elif isinstance(value, NAMESPACES | _WRAPPERS) or not is_library(kind.__module__):
            self._refer_kind(value, name)
            # The value of an instance of a user's subclass; that of an enumeration is an attribute.
            plain: Any = {base for base in kind.__mro__ if base in PLAIN} - {enum.Enum}
            self._key.extend(base.__repr__(value) for base in plain)
            held = attributes(value)
            whole = isinstance(value, _WRAPPERS | enum.Enum)
            self._refer_all(held if whole else self._named(held, of_object=True), name)
        elif isinstance(value, weakref.ref):
            self._refer(value(), name)
        elif isinstance(value, _CACHED):
            if self._strict and not is_library(value.__module__):
                raise Unknowable(f"calls {shown}, which caches results")
            self._refer(value.__wrapped__, name)
        elif isinstance(value, torch.jit.ScriptFunction):
            if self._strict:
                raise Unknowable(f"calls {shown}, which lives in TorchScript")
        elif isinstance(value, _GETTERS):
            parts: Any = value.__reduce__()
            maker, arguments = parts
            for text in (*getattr(maker, "args", ()), *arguments):
                self._names |= {*text.split(".")} if isinstance(text, str) else set()
            self._refer(parts, name)
        elif isinstance(value, bytearray | memoryview) or is_stateful(kind.__module__):
            if self._strict or not isinstance(value, _WRITE_ONLY):
                raise Unknowable(f"reads {shown}, an object of the module {kind.__module__}")
        elif not (name or self._strict or _is_value(value)):
            raise Unknowable(f"gets a {kind.__name__}, whose state cannot be restored")
        else:
            self._key.append(value if _is_hashable(value) else _Same(value))

    @property
    def _strict(self) -> bool:
        """Whether equal keys must imply the same behavior of the code."""
        return self._methods is not None

    def _visit_function(self, function: types.FunctionType) -> None:
        variables = zip(function.__code__.co_freevars, function.__closure__ or (), strict=True)
        for variable, cell in variables:
            self._refer(cell, variable)
        for default in (*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values()):
            self._refer(default, function.__name__)
        home = home_of(function)
        if is_library(home):
            self._key.append(function.__code__)
            if self._strict and is_impure(home):
                raise Unknowable(f"calls functions of the module {home}")
            return
        self._key.append(function.__code__)
        names = names_of(function.__code__)
        self._names |= names
        self._refer_all(self._named(vars(function)), function.__name__)
        world = function.__globals__
        for key in sorted(names & world.keys()):
            self._key.append(key)
            self._refer(world[key], key)
        for module, level in imports_of(function.__code__):
            if level:
                package = (world.get("__package__") or "").rsplit(".", level - 1)[0]
                module = f"{package}.{module}" if module else package
            self._visit_import(module)
        impure = sorted(((names & _IMPURE_BUILTINS) - world.keys()) | (names & _SEEDING))
        if impure and self._strict:
            raise Unknowable(f"calls {impure[0]}")

    def _visit_import(self, name: str) -> None:
        """Refer to a module that a function imports, and to the packages around it."""
        parts = name.split(".")
        for end in range(1, len(parts) + 1):
            module = sys.modules.get(".".join(parts[:end]))
            if module is not None:
                self._refer(module, name)
            elif self._strict and not (is_standard(name) or (end > 1 and is_library(parts[0]))):
                raise Unknowable(f"imports {name} while it runs")

    def _visit_module(self, module: nn.Module, name: str) -> None:
        kind: Any = type(module)
        if isinstance(module, torch.jit.ScriptModule):
            if self._strict or any(True for _ in module.buffers()):
                raise Unknowable(f"calls {name}, which lives in TorchScript")
            return
        is_root = module is self._root and isinstance(module, MessagePassing)
        if self._strict:
            entries = frozenset() if is_root else frozenset({"forward"})
            self._names |= special_methods_of(kind)
            self._names |= names_of_methods(kind, entries | self._names)
            if not is_root:
                self._refer(kind.forward, joined(name, "forward"))
        if is_root:
            for method in sorted(self._methods or ()):  # which may replace that of a library
                self._refer(getattr(kind, method), method)
        else:
            self._refer_hooks(module, name)
            own = vars(module).get("forward")  # which replaces that of the class
            if own is not None and not type(own).__module__.startswith("gact_graph."):
                self._refer(own, joined(name, "forward"))
        self._refer(kind, name, by_name=False)
        self._refer_all(self._read(module_attributes(module)), name)
        for group in ("_parameters", "_buffers", "_modules"):
            inside = vars(module).get(group, {})
            whole = isinstance(module, _MODULE_CONTAINERS)
            self._refer_all(inside if whole else self._read(inside), name)

    def _read(self, held: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return the entries of a module that its code, or the code of a library, may read."""
        return self._named(held) if self._strict else held

    def _refer_hooks(self, module: nn.Module, name: str) -> None:
        for group in HOOKS:
            for hook in vars(module).get(group, {}).values():
                if type(hook).__module__.startswith("gact_graph."):
                    continue
                if self._strict:  # it would run in a trace and never again
                    raise Unknowable(f"has a hook on its module {name}")
                self._refer(hook, name)

    def _named(self, held: Mapping[str, Any], of_object: bool = False) -> dict[str, Any]:
        """Return the entries that the code may read."""
        # What a class or a Python module holds is mostly code, which may reach the whole program.
        wide = self._strict or of_object
        return named(held, self._names if wide else self._names - DYNAMIC)


class _Same:
    """A key of an object that cannot be hashed, equal for the same object alone."""

    def __init__(self, value: Any) -> None:
        self._value = value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Same) and other._value is self._value

    def __hash__(self) -> int:
        return id(self._value)


def _is_hashable(value: Any) -> bool:
    try:
        hash(value)
    except TypeError:
        return False
    return True


def _is_value(value: Any) -> bool:
    """Return whether an object of a library that is not followed does not change."""
    return isinstance(value, _VALUES) or is_standard(type(value).__module__)


_known_names: dict[Any, frozenset[str]] = {}
"""The names that code contains, by the class or code where the search began."""


def _code_of(root: Any) -> Any:
    while isinstance(root, functools.partial):
        root = root.func
    root = getattr(root, "__func__", root)
    return getattr(root, "__code__", type(root))


def _described(tensor: Tensor) -> Hashable:
    """Return the properties of a tensor that affect code, except for its values."""
    strides = tensor.stride() if tensor.layout is torch.strided else None
    return tensor.dtype, tensor.device, tensor.shape, strides, tensor.requires_grad
