"""Which operation saves a tensor, and the slot that names the tensor.

A torch function mode sees each operation, and hooks on the modules see which module runs and in
which phase of message passing. The autograd node names the tensor. Together they make the slot:
``convs.1/lin/linear.input`` is the input of the operation ``linear`` in the submodule ``lin`` of
``convs.1``, and ``convs.1/edge_update/softmax.exp.result`` is the result of ``exp`` within PyG's
``softmax``.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from types import FunctionType
from typing import Any, NamedTuple

import torch.nn.functional as F
from torch import Tensor
from torch._C._autograd import _get_sequence_nr
from torch.compiler import is_compiling
from torch.overrides import (
    TorchFunctionMode,
    _get_current_function_mode,
    _pop_mode,
    _push_mode,
)

from gact_graph.capture.callers import caller_of
from gact_graph.capture.nodes import Attribute
from gact_graph.capture.queries import QUERIES
from gact_graph.support.storage import is_plain, place_of

SAVED = "saved"
"""The position of a tensor of which no node tells more."""


class Call:
    """One operation.

    Attributes:
        name: The name of its function, without underscores: ``mul``.
        label: The path of the module that runs it, and its name; empty until it saves something.
        running: Whether it runs now, followed by the function mode, which will see its result.
        of_layer: Whether it is not an operation, but a layer that runs again in backward.
        home: The Python module that called it; known once it has a label.
        of_loss: Whether it was called to compute a loss; known once it has a label.
        since: The sequence number of the first autograd node that it may have made.
        positions: How many tensors it has saved in each position.
        tensors: Tensors that it saves under names of their own, which no node knows.
        only_here: The names of those that stock autograd would not save.
    """

    # Of the class, for most operations save nothing, and nobody sets them.
    label = ""
    running = False
    of_layer = False
    home = ""
    of_loss = False
    since = 0
    positions: Mapping[str, int] = {}
    tensors: Mapping[str, Tensor] = {}
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

    def position_of(self, tensor: Tensor, saved: Attribute | None) -> str:
        """The name of a tensor that it saved.

        Args:
            tensor: The tensor.
            saved: Its place in the node that saved it; None where no node shows it.
        """
        own = self._name_of(tensor) if self.tensors else None
        if own is not None or saved is None:
            return own or SAVED
        # ``linear`` is an ``addmm`` or an ``mm``, by whether it has a bias: its slot is the same.
        of_linear = saved.name == "mat1" and self.name != saved.operation
        is_input = saved.name == "self" or of_linear or saved.is_square
        return "input" if is_input else saved.name

    def _name_of(self, tensor: Tensor) -> str | None:
        """The name of the one of :attr:`tensors` whose memory this tensor shares."""
        first = None
        for name, value in self.tensors.items():
            if value is tensor:
                return name
            plain = is_plain(value) and is_plain(tensor)
            if plain and place_of(value) == place_of(tensor):
                # They may be parts of one storage, as query, key and value are.
                if value.numel() == tensor.numel() and value.data_ptr() == tensor.data_ptr():
                    return name
                first = first or name
        return first


class Saver(NamedTuple):
    """What saves a tensor.

    Attributes:
        slot: The stable name of the saved tensor.
        call: The operation.
        position: The tensor's name in the operation.
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
        call.running, call.since = True, _get_sequence_nr()
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
        call = Call(_function(name), (), {})
        call.of_layer, call.tensors, call.only_here = True, tensors, only_here
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

    @property
    def call(self) -> Call:
        """The operation that runs, labelled."""
        # Functions outside torch (custom autograd functions, scripted code) are not seen.
        call = self._call or Call(_unseen, (), {})
        self.label(call, seen=self._call is not None)
        return call

    def saver(self, call: Call, position: str) -> Saver:
        """What saves a tensor.

        Args:
            call: The operation, which has a label.
            position: The tensor's name in the operation.
        """
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
