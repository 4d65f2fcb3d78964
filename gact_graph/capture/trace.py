"""Which operation saves a tensor, and the slot that names the tensor.

Autograd's saved-tensor hooks get a tensor and nothing else. A torch function mode sees each
operation with its arguments, and hooks on the modules see which module runs and in which phase of
message passing. Together they make the slot: ``convs.1/lin/linear.input`` is the argument ``input``
of the operation ``linear`` in the submodule ``lin`` of ``convs.1``, and
``convs.1/edge_update/softmax.exp.result`` is the result of ``exp`` within PyG's ``softmax``.
"""

from __future__ import annotations

import functools
import inspect
import itertools
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from types import FunctionType
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.compiler import is_compiling
from torch.overrides import (
    TorchFunctionMode,
    _get_current_function_mode,
    _pop_mode,
    _push_mode,
    get_testing_overrides,
)

from gact_graph.capture.callers import caller_of
from gact_graph.capture.queries import QUERIES
from gact_graph.support.storage import is_plain, place_of

RESULT = "result"
"""The position of a tensor that is no argument of the operation."""


class Call:
    """One operation.

    Attributes:
        name: The name of its function, without underscores: ``mul``.
        label: The path of the module that runs it, and its name; empty until it saves something.
        running: Whether it runs now, followed by the function mode, which will see its result.
        of_layer: Whether it is not an operation, but a layer that runs again in backward.
        home: The Python module that called it; known once it has a label.
        of_loss: Whether it was called to compute a loss; known once it has a label.
        positions: How many tensors it has saved in each position.
        made: Tensors that are saved in place of its arguments, by their positions.
        only_here: The arguments that are saved, and that stock autograd would not save.
    """

    # Of the class, for most operations save nothing, and nobody sets them.
    label = ""
    running = False
    of_layer = False
    home = ""
    of_loss = False
    positions: Mapping[str, int] = {}
    made: Mapping[str, Tensor] = {}
    only_here: Collection[str] = ()

    def __init__(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]):
        self.func = func
        self.name = _name_of(func)
        self.args = args
        self.kwargs = kwargs

    def argument(self, index: int, *names: str, default: Any = None) -> Any:
        """An argument by its index among the positional ones, or by one of its names."""
        if index < len(self.args):
            return self.args[index]
        return next((self.kwargs[name] for name in names if name in self.kwargs), default)

    def names(self) -> tuple[str, ...]:
        """The names of the positional arguments."""
        return _argument_names(self.func, len(self.args))

    def position_of(self, tensor: Tensor) -> str:
        """The name of the argument whose memory the tensor shares, else ``result``."""
        if not is_plain(tensor):
            return next((name for name, value in self._arguments() if value is tensor), RESULT)
        place, first = place_of(tensor), RESULT
        for name, value in self._arguments():
            if value is tensor:
                return name
            if is_plain(value) and place_of(value) == place:
                # Arguments may be parts of one storage, as query, key and value are.
                if _is_same_part(value, tensor):
                    return name
                first = name if first is RESULT else first
        return first

    def _arguments(self) -> Iterator[tuple[str, Tensor]]:
        named = zip(self.names(), self.args, strict=True)
        for name, value in itertools.chain(self.made.items(), named, self.kwargs.items()):
            if isinstance(value, Tensor):
                yield name, value
            elif isinstance(value, (tuple, list)):
                for i, item in enumerate(value):
                    if isinstance(item, Tensor):
                        yield f"{name}.{i}", item


class Saver(NamedTuple):
    """What saves a tensor.

    Attributes:
        slot: The stable name of the saved tensor.
        call: The operation.
        position: What the tensor is in the operation: the name of an argument, or ``result``.
        of_edges: Whether messages are made, so that its first dimension is that of edges.
    """

    slot: str
    call: Call
    position: str
    of_edges: bool


class Trace(TorchFunctionMode):
    """Follows the operations, modules and phases of one forward, and names what they save.

    Args:
        after: Called with each operation and its result.
        instead: Called with each operation before it runs; returns what is to run in its place, or
            None.

    Attributes:
    """

    def __init__(
        self,
        after: Callable[[Call, Any], None],
        instead: Callable[[Call], Callable[[], Any] | None] = lambda call: None,
    ) -> None:
        super().__init__()
        self._after = after
        self._instead = instead
        self._call: Call | None = None
        self._steps: list[str] = []
        # For each step the module's full name; None for a phase of message passing.
        self._modules: list[str | None] = []
        self._operations: Counter[str] = Counter()
        self._pauses = 0

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if is_compiling() or self._pauses or func in QUERIES:
            return func(*args, **kwargs) if kwargs else func(*args)
        if func is F.multi_head_attention_forward:
            # It is written in Python. The operations in it are followed in its place.
            with self:
                return _opened(func)(*args, **(kwargs or {}))
        call = Call(func, args, kwargs or {})
        call.running = True
        outer, self._call = self._call, call
        try:
            other = self._instead(call)
            result = func(*call.args, **call.kwargs) if other is None else other()
        finally:
            self._call = outer
            call.running = False
        self._after(call, result)
        return result

    def __exit__(self, *error: Any) -> None:
        # An interrupt may have come while it stood aside.
        if _get_current_function_mode() is self:
            super().__exit__(*error)

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Operations inside are not followed."""
        # Where it is the innermost mode it steps aside, so that they do not run through Python.
        aside = _get_current_function_mode() is self
        if aside:
            _pop_mode()
        self._pauses += 1
        try:
            yield
        finally:
            self._pauses -= 1
            if aside:
                _push_mode(self)

    @contextmanager
    def standing_for(
        self, name: str, tensors: dict[str, Tensor], only_here: Collection[str] = ()
    ) -> Iterator[Call]:
        """Tensors saved inside count as arguments of one operation, which this gives.

        Args:
            name: Its name.
            tensors: Its arguments by their names.
            only_here: Those that stock autograd would not save.
        """
        call = Call(_function(name), (), tensors)
        call.of_layer = True
        call.only_here = only_here
        outer, self._call = self._call, call
        try:
            yield call
        finally:
            self._call = outer

    @property
    def inside_module(self) -> bool:
        return bool(self._modules)

    @property
    def module(self) -> str | None:
        """The full name of the submodule that runs; None in a phase of message passing."""
        return self._modules[-1] if self._modules else None

    def enter(self, module: str) -> None:
        """A submodule, by its full name, starts."""
        outer = next((name for name in reversed(self._modules) if name is not None), None)
        self._steps.append(module if outer is None else module.removeprefix(f"{outer}."))
        self._modules.append(module)

    def leave(self, module: str) -> None:
        """A submodule has ended, and so has a phase in it that an exception cut off."""
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
        """What is saving the tensor.

        Args:
            tensor: The tensor.
            call: The operation; None for the one that runs.
        """
        call = call or self._call
        seen = call is not None
        # Functions outside torch (custom autograd functions, scripted code) are not seen.
        call = call or Call(_unseen, (), {})
        self.label(call, seen)
        position = call.position_of(tensor)
        count = call.positions.get(position, 0) + 1
        call.positions = {**call.positions, position: count}
        suffix = "" if count == 1 else f".{count}"
        of_edges = self._modules[-1:] == [None] and self._steps[-1] != "aggregate"
        return Saver(f"{call.label}.{position}{suffix}", call, position, of_edges)

    def label(self, call: Call, seen: bool = True) -> str:
        """The name of an operation; the slots of what it saves start with it."""
        if not call.label:
            name = call.name
            if seen:
                caller = caller_of(Trace.__torch_function__.__code__)
                call.home, call.of_loss = caller.module, caller.of_loss
                name = f"{caller.helper}.{name}" if caller.helper else name
            label = "/".join([*self._steps, name])
            self._operations[label] += 1
            count = self._operations[label]
            call.label = label if count == 1 else f"{label}#{count}"
        return call.label


@functools.lru_cache(maxsize=4096)  # a library may make functions as it goes
def _name_of(func: Callable[..., Any]) -> str:
    name: str = getattr(func, "__name__", type(func).__name__)
    return name.strip("_")


@functools.cache
def _function(name: str) -> Callable[[], None]:
    """A function of this name, always the same one, as functions are keys of caches."""

    def function() -> None: ...

    function.__name__ = name
    return function


def _is_same_part(left: Tensor, right: Tensor) -> bool:
    if left.numel() != right.numel():
        return False
    return left.data_ptr() == right.data_ptr()


@functools.cache
def _opened(func: FunctionType) -> FunctionType:
    """A function of torch that is written in Python, without its check for a function mode."""
    names = {name for name in func.__code__.co_names if name.startswith("has_torch_function")}
    world = func.__globals__ | dict.fromkeys(names, lambda *args: False)
    opened = FunctionType(func.__code__, world, func.__name__, func.__defaults__, func.__closure__)
    opened.__kwdefaults__ = func.__kwdefaults__
    return opened


def _unseen() -> None:
    """Stands for the function of a call that no function mode saw."""


_unseen.__name__ = "function"


@functools.cache
def _overrides() -> dict[Callable[..., Any], Callable[..., Any]]:
    return get_testing_overrides()


@functools.lru_cache(maxsize=4096)  # a library may make functions as it goes
def _argument_names(func: Callable[..., Any], count: int) -> tuple[str, ...]:
    # Builtins have no signature. For most of them torch keeps a Python function that has the same
    # arguments. A method without one (PyG replaces torch.index_select) has those of the function of
    # its name.
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
