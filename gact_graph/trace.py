"""Who saves what, and where: the name of each context while a forward runs.

Autograd's saved-tensor hooks give a tensor and nothing else. A torch function mode sees each
operation with its arguments, and hooks on the modules see which one runs, in which phase of message
passing; together they name the context: ``convs.1/lin/linear.input`` is the argument ``input`` of
the operation ``linear`` in the submodule ``lin`` of ``convs.1``, and
``convs.1/edge_update/softmax.exp.result`` what ``exp`` gave within PyG's ``softmax``.
"""

from __future__ import annotations

import functools
import inspect
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode, get_testing_overrides

from gact_graph.storage import is_plain, key_of


class Call:
    """One operation while it runs."""

    def __init__(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]):
        self.func = func
        self.name = getattr(func, "__name__", type(func).__name__).strip("_")
        self.args = args
        self.kwargs = kwargs
        self.label = ""
        self.positions: Counter[str] = Counter()

    def argument(self, place: int, *names: str, default: Any = None) -> Any:
        """An argument by its place or by one of its names."""
        if place < len(self.args):
            return self.args[place]
        return next((self.kwargs[name] for name in names if name in self.kwargs), default)

    def position_of(self, tensor: Tensor) -> str:
        """The name of the argument that shares its memory with the tensor, else ``result``."""
        key = key_of(tensor) if is_plain(tensor) else None
        for name, value in self._arguments():
            if value is tensor or (key is not None and is_plain(value) and key_of(value) == key):
                return name
        return "result"

    def _arguments(self) -> Iterator[tuple[str, Tensor]]:
        named = [*zip(_argument_names(self.func, len(self.args)), self.args, strict=True)]
        for name, value in [*named, *self.kwargs.items()]:
            if isinstance(value, Tensor):
                yield name, value
            elif isinstance(value, (tuple, list)):
                for i, item in enumerate(value):
                    if isinstance(item, Tensor):
                        yield f"{name}.{i}", item


@dataclass(frozen=True)
class Saver:
    """Who saves a tensor: the slot's name, the operation, and the tensor's place in it."""

    slot: str
    call: Call
    position: str
    of_edges: bool


class Trace(TorchFunctionMode):
    """Follows operations, modules and phases of one forward, and names what they save.

    Args:
        after: Called with each operation and its result.
    """

    def __init__(self, after: Callable[[Call, Any], None]) -> None:
        super().__init__()
        self._after = after
        self._call: Call | None = None
        self._steps: list[str] = []
        # For each step the module's full name; None for a phase of message passing.
        self._modules: list[str | None] = []
        self._operations: Counter[str] = Counter()
        self._pauses = 0

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if self._pauses:
            return func(*args, **(kwargs or {}))
        call = Call(func, args, kwargs or {})
        outer, self._call = self._call, call
        try:
            result = func(*call.args, **call.kwargs)
        finally:
            self._call = outer
        self._after(call, result)
        return result

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Follows no operation meanwhile."""
        self._pauses += 1
        try:
            yield
        finally:
            self._pauses -= 1

    @contextmanager
    def standing_for(self, name: str, tensors: dict[str, Tensor]) -> Iterator[None]:
        """What is saved meanwhile is an argument, by its name, of one operation of this name."""

        def function() -> None: ...

        function.__name__ = name
        outer, self._call = self._call, Call(function, (), tensors)
        try:
            yield
        finally:
            self._call = outer

    @property
    def inside_module(self) -> bool:
        return bool(self._modules)

    def enter(self, module: str) -> None:
        """A submodule, by its full name, starts."""
        outer = next((name for name in reversed(self._modules) if name is not None), None)
        self._steps.append(module if outer is None else module.removeprefix(f"{outer}."))
        self._modules.append(module)

    def leave(self, module: str) -> None:
        """The submodule has ended, and with it a phase that an exception may have cut off."""
        # An exception in another hook may have kept us from entering it.
        if module in self._modules:
            while self._modules[-1] is None:
                self._pop()
            if self._modules[-1] == module:
                self._pop()

    def enter_phase(self, phase: str) -> None:
        """A phase of message passing starts."""
        self._steps.append(phase)
        self._modules.append(None)

    def leave_phase(self, phase: str) -> None:
        """The phase has ended."""
        if self._modules and self._modules[-1] is None and self._steps[-1] == phase:
            self._pop()

    def _pop(self) -> None:
        self._steps.pop()
        self._modules.pop()

    def saver(self, tensor: Tensor, call: Call | None = None) -> Saver:
        """Who is saving the tensor: the operation that runs, or the one that just ran."""
        call = call or self._call
        seen = call is not None
        # Functions outside torch (custom autograd functions, scripted code) are not seen.
        call = call or Call(_unseen, (), {})
        if not call.label:
            helper = _helper() if seen else ""
            label = "/".join([*self._steps, helper + call.name])
            self._operations[label] += 1
            count = self._operations[label]
            call.label = label if count == 1 else f"{label}#{count}"
        position = call.position_of(tensor)
        call.positions[position] += 1
        count = call.positions[position]
        suffix = "" if count == 1 else f".{count}"
        of_edges = self._modules[-1:] == [None] and self._steps[-1] != "aggregate"
        return Saver(f"{call.label}.{position}{suffix}", call, position, of_edges)


def _unseen() -> None:
    """Stands for the function of a call that no function mode saw."""


_unseen.__name__ = "function"


def _helper() -> str:
    """``softmax.`` where the operation is a step of PyG's softmax, and so on; else nothing."""
    frame: Any = sys._getframe()
    while frame is not None and frame.f_code is not Trace.__torch_function__.__code__:
        frame = frame.f_back
    name = ""
    while frame is not None:
        frame = frame.f_back
        module = "" if frame is None else frame.f_globals.get("__name__", "")
        if module.startswith("torch_geometric.utils"):
            name = frame.f_code.co_name
        elif not module.startswith(("torch.", "torch_geometric.experimental")):
            break
    return f"{name.strip('_')}." if name else ""


@functools.cache
def _overrides() -> dict[Callable[..., Any], Callable[..., Any]]:
    return get_testing_overrides()


@functools.cache
def _argument_names(func: Callable[..., Any], count: int) -> tuple[str, ...]:
    # Builtins have no signature; torch keeps a Python stand-in with the same one for most. A method
    # without one (PyG replaces torch.index_select) has the arguments of the function of its name.
    twin = getattr(torch, getattr(func, "__name__", "").strip("_"), func)
    parameters: list[inspect.Parameter] = []
    for candidate in (_overrides().get(func, func), _overrides().get(twin, twin)):
        try:
            parameters = [*inspect.signature(candidate).parameters.values()]
            break
        except (TypeError, ValueError):
            continue
    names = [p.name for p in parameters if p.kind is not p.VAR_KEYWORD]
    return tuple(names[i] if i < len(names) else f"arg{i}" for i in range(count))
