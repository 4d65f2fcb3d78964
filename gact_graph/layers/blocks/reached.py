"""A function and all that it reaches, as a module: so it can run later as it would run now.

A function that is written within a forward reads the variables of that forward. These have other
values when backward runs: a loop has gone on to its next layer. So their values are taken when the
module is made, and what learns among them is known.
"""

from __future__ import annotations

import dis
import functools
import types
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

from torch import Tensor, nn

_PLAIN = (bool, int, float, str, type(None))

_MANY = 1000
"""Items of a container above which nobody looks for modules and tensors among them."""

_READS = frozenset({"LOAD_GLOBAL", "LOAD_NAME"})
_WRITES = frozenset({"STORE_GLOBAL", "DELETE_GLOBAL", "STORE_DEREF", "DELETE_DEREF"})


class _Parts(NamedTuple):
    modules: nn.ModuleList
    parameters: nn.ParameterList
    tensors: list[Tensor]


_Make = Callable[[_Parts], Any]
"""Makes a value of the parts that were found in it."""


class _Same:
    """Gives the value itself; of a list or dictionary that has changed since, a copy as it was.

    A copy in any case would not show what the function does to it.
    """

    def __init__(self, value: Any) -> None:
        self._value = value
        self._before = value.copy() if isinstance(value, list | dict) else value

    def __call__(self, parts: _Parts) -> Any:
        changed = self._before is not self._value and self._before != self._value
        return self._before.copy() if changed else self._value


class Function(nn.Module):
    """A function as it was when this was made by :func:`taken`.

    A replica of this module has replicas of the modules that the function reaches. Tensors that are
    no parameters are not held: whoever runs the function passes them.

    Args:
        function: The function.
        make: Makes the function again.
        found: What was found in it.
    """

    def __init__(self, function: Callable[..., Any], make: _Make, found: _Finder) -> None:
        super().__init__()
        self._recipe = _Recipe(function, make)
        self._inner_modules = nn.ModuleList(found.modules)
        self._inner_parameters = nn.ParameterList(found.parameters)
        # An attribute of plain values counts as a setting, on which depends what is found out.
        self.settings = tuple(found.settings)

    @property
    def code(self) -> Callable[..., Any]:
        """The function that this was made of."""
        return self._recipe.function

    def made(self, tensors: list[Tensor]) -> Callable[..., Any]:
        """The function, with these in place of the tensors that :func:`taken` gave."""
        parts = _Parts(self._inner_modules, self._inner_parameters, tensors)
        function: Callable[..., Any] = self._recipe.make(parts)
        return function


class _Recipe:
    """Holds functions; as attributes by themselves they would count as settings."""

    def __init__(self, function: Callable[..., Any], make: _Make) -> None:
        self.function = function
        self.make = make


def taken(function: Callable[..., Any]) -> tuple[Function, list[Tensor]]:
    """The function as a module, and the tensors that it reaches, parameters aside.

    Followed are modules, bound methods of modules, ``functools.partial``, and functions: their
    defaults, the variables of functions around them, and the globals that they name. A function
    that assigns such variables stays as it is.
    """
    found = _Finder()
    make = found.make(function)
    return Function(function, make, found), found.tensors


class _Finder:
    """Finds modules, parameters and tensors in a value.

    Attributes:
        modules: Modules, each once, as the other two.
        parameters: Parameters that are variables by themselves.
        tensors: Other tensors.
        settings: Plain values, and what tells functions apart.
    """

    def __init__(self) -> None:
        self.modules: list[nn.Module] = []
        self.parameters: list[nn.Parameter] = []
        self.tensors: list[Tensor] = []
        self.settings: list[Any] = []
        self._open: list[Any] = []  # functions that call themselves are met again

    def make(self, value: Any) -> _Make:
        """How to make a value again."""
        if isinstance(value, nn.Module):
            module = _number(self.modules, value)
            return lambda parts: parts.modules[module]
        if isinstance(value, nn.Parameter):
            parameter = _number(self.parameters, value)
            return lambda parts: parts.parameters[parameter]
        if isinstance(value, Tensor):
            tensor = _number(self.tensors, value)
            return lambda parts: parts.tensors[tensor]
        if any(value is one for one in self._open):
            return _Same(value)
        self._open.append(value)
        try:
            return self._make_of_parts(value)
        finally:
            self._open.pop()

    def _make_of_parts(self, value: Any) -> _Make:
        kind = type(value)
        if kind is types.FunctionType and not _accesses(value.__code__).writes:
            return self._function(value)
        if kind is types.MethodType and isinstance(value.__self__, nn.Module):
            self.settings.append(id(value.__func__))
            owner = self.make(value.__self__)
            return lambda parts: types.MethodType(value.__func__, owner(parts))
        if kind is functools.partial:
            func, args = self.make(value.func), self.make(value.args)
            keywords = self.make(value.keywords)
            return lambda parts: functools.partial(func(parts), *args(parts), **keywords(parts))
        if kind in (tuple, list) and len(value) <= _MANY:
            items = [self.make(item) for item in value]
            if all(isinstance(item, _Same) for item in items):
                return _Same(value)
            return lambda parts: kind(item(parts) for item in items)
        if kind is dict and len(value) <= _MANY:
            values = {key: self.make(item) for key, item in value.items()}
            if all(isinstance(item, _Same) for item in values.values()):
                return _Same(value)
            return lambda parts: {key: item(parts) for key, item in values.items()}
        self.settings.append(value if kind in _PLAIN else kind.__qualname__)
        return _Same(value)

    def _function(self, function: types.FunctionType) -> _Make:
        self.settings.append(id(function.__code__))
        world: dict[str, _Make] = {}
        for name in _accesses(function.__code__).reads:
            made_of = self._global(function, name)
            if made_of is not None:
                world[name] = made_of
        cells = [self._cell(cell) for cell in function.__closure__ or ()]
        defaults = self.make(function.__defaults__)
        keyword_defaults = self.make(function.__kwdefaults__)
        fixed = {
            name: value
            for name, value in function.__globals__.items()
            if name in ("__builtins__", "__name__")
        }

        def make(parts: _Parts) -> Callable[..., Any]:
            made = types.FunctionType(
                function.__code__,
                fixed | {name: one(parts) for name, one in world.items()},
                function.__name__,
                defaults(parts),
                tuple(cell(parts) for cell in cells),
            )
            made.__kwdefaults__ = keyword_defaults(parts)
            return made

        return make

    def _global(self, function: types.FunctionType, name: str) -> _Make | None:
        if name not in function.__globals__:  # built in, or not there yet
            return None
        value = function.__globals__[name]
        elsewhere = getattr(value, "__globals__", None) is not function.__globals__
        if isinstance(value, types.ModuleType | type) or (
            isinstance(value, types.FunctionType) and elsewhere
        ):
            return _Same(value)  # of a library
        return self.make(value)

    def _cell(self, cell: types.CellType) -> _Make:
        try:
            content = cell.cell_contents
        except ValueError:  # not assigned yet
            return lambda parts: cell
        make = self.make(content)
        return lambda parts: types.CellType(make(parts))


class _Accesses(NamedTuple):
    """What a function reads of the globals, and whether it assigns variables outside of it."""

    reads: tuple[str, ...]
    writes: bool


@functools.lru_cache(maxsize=256)
def _accesses(code: types.CodeType) -> _Accesses:
    reads: set[str] = set()
    writes = False
    for inner in _nested(code):
        for step in dis.get_instructions(inner):
            if step.opname in _READS:
                reads.add(str(step.argval))
            elif step.opname in _WRITES:
                # A variable of its own that an inner function reads is written that way, too.
                writes |= "GLOBAL" in step.opname or step.argval in code.co_freevars
    return _Accesses(tuple(sorted(reads)), writes)


def _nested(code: types.CodeType) -> Iterable[types.CodeType]:
    yield code
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _nested(constant)


def _number(known: list[Any], value: Any) -> int:
    """The index of a value in a list, to which it is added if it is new."""
    found = next((i for i, one in enumerate(known) if one is value), None)
    if found is None:
        known.append(value)
        return len(known) - 1
    return found
