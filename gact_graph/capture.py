"""Who saves what, and where: the name of each context while a forward runs.

Autograd's saved-tensor hooks give a tensor and nothing else. A torch function mode sees each
operation with its arguments, and hooks on the submodules see which module runs; together they
name the context: ``convs.1/lin/linear.input`` is the argument ``input`` of the operation ``linear``
in the submodule ``lin`` of ``convs.1``.
"""

from __future__ import annotations

import functools
import inspect
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
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


class Trace(TorchFunctionMode):
    """Follows the operations and the submodules of one forward, and names what they save."""

    def __init__(self) -> None:
        super().__init__()
        self._call: Call | None = None
        self._steps: list[str] = []
        self._modules: list[str] = []
        self._operations: Counter[str] = Counter()

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        outer, self._call = self._call, Call(func, args, kwargs)
        try:
            return func(*args, **kwargs)
        finally:
            self._call = outer

    @property
    def inside_module(self) -> bool:
        return bool(self._modules)

    def enter(self, module: str) -> None:
        """A submodule, by its full name, starts."""
        parent = f"{self._modules[-1]}." if self._modules else ""
        self._steps.append(module.removeprefix(parent))
        self._modules.append(module)

    def leave(self, module: str) -> None:
        """The submodule has ended."""
        # An exception in another hook may have kept us from entering it.
        if self._modules and self._modules[-1] == module:
            self._steps.pop()
            self._modules.pop()

    def name(self, tensor: Tensor) -> tuple[str, str]:
        """Slot and operation of a tensor that is being saved."""
        # Functions outside torch (custom autograd functions, scripted code) are not seen.
        call = self._call or Call(_unseen, (), {})
        if not call.label:
            label = "/".join([*self._steps, call.name])
            self._operations[label] += 1
            count = self._operations[label]
            call.label = label if count == 1 else f"{label}#{count}"
        position = call.position_of(tensor)
        call.positions[position] += 1
        count = call.positions[position]
        suffix = "" if count == 1 else f".{count}"
        return f"{call.label}.{position}{suffix}", call.name


def _unseen() -> None:
    """Stands for the function of a call that no function mode saw."""


_unseen.__name__ = "function"


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


_local = threading.local()


def current() -> Any:
    """The session that captures on this thread, or None."""
    return getattr(_local, "session", None)


def set_current(session: Any) -> None:
    """Makes ``session`` (or None) the one that captures on this thread."""
    _local.session = session


class Owner:
    """Tells the hooks of one wrapped model from those of others, by identity.

    A copy of the model, pickled or deep-copied, has another one, and its hooks share it.
    """


def session_of(owner: Owner) -> Any:
    """The session that captures on this thread if it is this owner's, or None."""
    session = current()
    return session if session is not None and session.owner is owner else None


class ModuleHook:
    """What both hooks on a submodule know. They hold no session, so that modules stay picklable."""

    def __init__(self, owner: Owner, module: str) -> None:
        self.owner = owner
        self.module = module


class EnterModule(ModuleHook):
    """Forward pre-hook on a submodule."""

    def __call__(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        session = session_of(self.owner)
        if session is not None:
            session.enter(self.module, (args, kwargs))


class LeaveModule(ModuleHook):
    """Forward hook on a submodule, called also when its forward raises."""

    def __call__(self, module: nn.Module, args: Any, output: Any) -> None:
        session = session_of(self.owner)
        if session is not None:
            session.leave(self.module)
