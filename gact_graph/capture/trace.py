"""The operation that saves a tensor, and the slot that names the tensor.

A torch function mode sees each operation. Hooks on modules report the module and the phase of
message passing that runs. The autograd node names the tensor. Together they make the slot:
``convs.1/lin/linear.input`` is the input of the operation ``linear`` in the submodule ``lin`` of
``convs.1``, and ``convs.1/edge_update/softmax.exp.result`` is the result of ``exp`` within PyG's
``softmax``.
"""

from __future__ import annotations

import functools
import sys
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from types import FunctionType, GetSetDescriptorType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.compiler import is_compiling
from torch.overrides import TorchFunctionMode

from gact_graph.capture.call_site import call_site
from gact_graph.capture.nodes import Attribute
from gact_graph.codecs import Saved
from gact_graph.codecs.reads import EXACT, Reads
from gact_graph.ops.bernoulli import DropoutNoise
from gact_graph.support.rows import numbered
from gact_graph.support.storage import is_plain, storage_id
from gact_graph.support.torch_private import (
    function_mode,
    next_sequence_number,
    pop_function_mode,
    push_function_mode,
)

SAVED = "saved"
"""The position of a tensor that no autograd node shows."""

_METHODS = (
    *("size", "dim", "ndimension", "numel", "nelement", "stride", "storage_offset", "__len__"),
    *("is_contiguous", "is_floating_point", "is_complex", "is_signed", "is_conj", "is_neg"),
    *("is_inference", "element_size", "get_device"),
)

_FOLLOWED = frozenset(
    {"data", "T", "mT", "H", "mH", "real", "imag", "_base", "__cuda_array_interface__", "grad_fn"}
)

# Functions that save nothing and return nothing that could be saved, as a function mode gets them:
# methods, and getters of attributes. There are about ten of them for each operation of a layer.
# Attributes through which memory can be read or written, or hooks be added, are followed.
_QUERIES = frozenset(
    [
        *(
            attribute.__get__
            for part in Tensor.__mro__
            for name, attribute in vars(part).items()
            if isinstance(attribute, (GetSetDescriptorType, property)) and name not in _FOLLOWED
        ),
        *(getattr(Tensor, name) for name in _METHODS),
        *(getattr(torch, name) for name in _METHODS if hasattr(torch, name)),
    ]
)

NODE: Callable[..., Any] = Tensor.grad_fn.__get__  # type: ignore[union-attr]

_ASKED = frozenset({Tensor.untyped_storage, Tensor.data_ptr, NODE})


def _is_own(func: Callable[..., Any]) -> bool:
    """Return whether this library asks for memory or a node, which it leaves alone."""
    if func not in _ASKED:
        return False
    caller = sys._getframe(2)  # of the function mode
    # Code that runs through `exec` may have no name.
    return str(caller.f_globals.get("__name__")).startswith(__name__.partition(".")[0])


class Call:
    """One call of an operation.

    Attributes:
        name: The name of its function, without underscores at the ends: ``mul``. That of a function
            that is neither torch's nor PyG's names its origin, too, so that no table has it:
            ``mylib.mul``.
        label: The path of the module that runs it, and its name; empty until it saves a tensor.
        running: Whether it is running now under the function mode, so that the session is notified
            when it returns.
        of_layer: Whether it stands for a layer that runs again in backward.
        caller: The Python module that called it; known once it has a label.
        of_loss: Whether it was called to compute a loss; known once it has a label.
        since: The sequence number of the first autograd node that it may have made.
        positions: The number of tensors that it has saved in each position.
        tensors: Tensors that it saves under its own names, which no autograd node knows.
        extra_saved: The names of those that stock autograd would not save.
        gathered: The names of those of which messages gather rows.
        noise: The noise of a dropout, of which it saves a placeholder.
    """

    # Defaults on the class: most operations save nothing, and set none of these.
    label = ""
    running = False
    of_layer = False
    caller = ""
    of_loss = False
    since = 0
    positions: Mapping[str, int] = {}
    tensors: Mapping[str, Tensor] = {}
    extra_saved: Collection[str] = ()
    gathered: Collection[str] = ()
    noise: DropoutNoise | None = None

    def __init__(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]):
        self.func = func
        self.name: str = _name_of(func)
        self.args = args
        self.kwargs = kwargs

    def argument(self, index: int, *names: str, default: Any = None) -> Any:
        """Return an argument by its index among the positional ones, or by one of its names."""
        if index < len(self.args):
            return self.args[index]
        return next((self.kwargs[name] for name in names if name in self.kwargs), default)

    def position_of(self, tensor: Tensor, attribute: Attribute | None) -> str:
        """Return the name of a tensor that the operation saved.

        Args:
            tensor: The tensor.
            attribute: Its attribute of the autograd node; None if no node shows it.
        """
        own = self._name_of(tensor) if self.tensors else None
        if own is not None or attribute is None:
            return own or SAVED
        # ``linear`` is an ``addmm`` or an ``mm``, by whether it has a bias: its slot is the same.
        of_linear = attribute.name == "mat1" and self.name != attribute.operation
        is_input = attribute.name == "self" or of_linear or attribute.is_square
        return "input" if is_input else attribute.name

    def _name_of(self, tensor: Tensor) -> str | None:
        """Return the name in :attr:`tensors` of the memory that this tensor shares."""
        first = None
        for name, value in self.tensors.items():
            if value is tensor:
                return name
            plain = is_plain(value) and is_plain(tensor)
            if plain and storage_id(value) == storage_id(tensor):
                # They may be parts of one storage, as query, key and value are.
                if value.numel() == tensor.numel() and value.data_ptr() == tensor.data_ptr():
                    return name
                first = first or name
        return first


@dataclass(slots=True)
class Save:
    """One tensor that an operation saves for backward.

    Attributes:
        tensor: The tensor; detached if it is dense.
        call: The operation.
        requires_grad: Whether the tensor requires a gradient.
        position: The tensor's name in the operation.
        slot: The stable name of the saved tensor.
        of_edges: Whether messages are computed, so that the first dimension is that of edges.
        reads: The part of the tensor that backward reads.
        by_autograd: Whether stock autograd saves the tensor, too.
        pending: What autograd holds while the operation runs; it gets its final context later.
        version: The tensor's version when it was saved.
        mask: A saved tensor that is probably zero only where the tensor is; see
            :func:`gact_graph.capture.masks.mask_of`.
    """

    tensor: Tensor
    call: Call
    requires_grad: bool
    position: str = ""
    slot: str = ""
    of_edges: bool = False
    reads: Reads = EXACT
    by_autograd: bool = True
    pending: Saved | None = None
    version: int | None = None
    mask: Saved | None = None


class Trace(TorchFunctionMode):
    """Follows the operations, modules and phases of one forward, and names the tensors they save.

    A function of torch that is written in Python takes the innermost mode from torch's stack while
    it runs. If a signal interrupts it as it ends, the mode is back once the traceback of the
    exception is gone, after the end of the forward. A closed trace therefore follows nothing, and
    the next one removes it.

    Args:
        after: A callback for each operation and its result.
        instead: A callback for each operation before it runs. It returns a function to run in
            place of the operation, or None.

    Attributes:
        is_closed: Whether the forward has ended.
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
        # The modules and phases that run, with the full names of modules; None for a phase.
        self._stack: list[tuple[str, str | None]] = []
        self._operations: Counter[str] = Counter()
        self._pauses = 0
        self.is_closed = False

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        stands_aside = self.is_closed or self._pauses or is_compiling()
        if stands_aside or func in _QUERIES or _is_own(func):
            return func(*args, **kwargs) if kwargs else func(*args)
        if func is F.multi_head_attention_forward:
            # It is written in Python. The operations inside are followed in its place.
            with self:
                return _without_dispatch(func)(*args, **(kwargs or {}))
        call = Call(func, args, kwargs or {})
        call.running, call.since = True, next_sequence_number()
        outer, self._call = self._call, call
        try:
            replacement = self._instead(call)
            result = func(*call.args, **call.kwargs) if replacement is None else replacement()
        finally:
            self._call = outer
            call.running = False
        self._after(call, result)
        return result

    def __enter__(self) -> Trace:
        while isinstance(mode := function_mode(), Trace) and mode.is_closed:
            pop_function_mode()
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        # A signal may arrive while the mode is paused.
        if function_mode() is self:
            super().__exit__(*error)

    def close(self) -> None:
        """Follow no more operations, wherever a signal interrupted."""
        self.is_closed = True
        self.__exit__(None, None, None)

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Follow no operations inside."""
        # The innermost mode leaves the stack, so that operations do not run through Python.
        is_innermost = function_mode() is self
        if is_innermost:
            pop_function_mode()
        self._pauses += 1
        try:
            yield
        finally:
            self._pauses -= 1
            if is_innermost and not self.is_closed:
                push_function_mode(self)

    @contextmanager
    def standing_for(
        self,
        name: str,
        tensors: dict[str, Tensor],
        extra_saved: Collection[str] = (),
        gathered: Collection[str] = (),
    ) -> Iterator[Call]:
        """Count tensors that are saved inside as arguments of one operation, and yield its call.

        Args:
            name: The name of the operation.
            tensors: Its arguments by name.
            extra_saved: The names of those that stock autograd would not save.
            gathered: The names of those of which messages gather rows.
        """
        call = Call(_function(name), (), {})
        call.of_layer, call.tensors, call.extra_saved = True, tensors, extra_saved
        call.gathered = gathered
        outer, self._call = self._call, call
        try:
            yield call
        finally:
            self._call = outer

    @property
    def inside_module(self) -> bool:
        return bool(self._stack)

    @property
    def module(self) -> str | None:
        """The full name of the submodule that runs; None in a phase of message passing."""
        return self._stack[-1][1] if self._stack else None

    def enter(self, module: str) -> None:
        """Enter a submodule, by its full name."""
        outer = next((name for _, name in reversed(self._stack) if name is not None), None)
        step = module if outer is None else module.removeprefix(f"{outer}.")
        self._stack.append((step, module))

    def leave(self, module: str) -> None:
        """Leave a submodule, and a phase in it that an exception interrupted."""
        # An exception in another hook may have prevented `enter`.
        if any(name == module for _, name in self._stack):
            while self.module is None:
                self._stack.pop()
            if self.module == module:
                self._stack.pop()

    def enter_phase(self, phase: str) -> None:
        """Enter a phase of message passing."""
        self._stack.append((phase, None))

    def leave_phase(self, phase: str) -> None:
        """Leave a phase of message passing."""
        if self._stack[-1:] == [(phase, None)]:
            self._stack.pop()

    @property
    def call(self) -> Call:
        """The operation that runs, labelled."""
        # Functions outside torch (custom autograd functions, scripted code) are not seen.
        call = self._call or Call(_unseen, (), {})
        self.label(call)
        return call

    def name(self, save: Save, position: str) -> None:
        """Set the position, slot and kind of a tensor whose operation has a label."""
        call = save.call
        count = call.positions.get(position, 0) + 1
        call.positions = {**call.positions, position: count}
        suffix = "" if count == 1 else f".{count}"
        save.position, save.slot = position, f"{call.label}.{position}{suffix}"
        step, module = self._stack[-1] if self._stack else ("", "")
        save.of_edges = module is None and step != "aggregate"

    def label(self, call: Call) -> str:
        """Return the name of an operation, with which the slots of its saved tensors begin."""
        if not call.label:
            name = _bare_name_of(call.func)
            if call.func is not _unseen:
                entry = Trace.__torch_function__.__code__
                helper, call.caller, call.of_loss = call_site(entry)
                name = f"{helper}.{name}" if helper else name
            label = "/".join([*(step for step, _ in self._stack), name])
            call.label = numbered(self._operations, label)
        return call.label


_OPERATORS = "torch._ops."
"""The prefix of the modules of operators, which the namespace follows."""

_NAMESPACES = frozenset({"aten", "prim", "prims", "torch_sparse", "torch_scatter", "pyg"})
"""The namespaces of the operators of torch and PyG, which tables name."""


@functools.lru_cache(maxsize=4096)  # libraries may create functions at run time
def _name_of(func: Callable[..., Any]) -> str:
    """Return the name of a function, with its origin before it if that is a library of others."""
    name = _bare_name_of(func)
    if isinstance(func, FunctionType):
        home = str(func.__globals__.get("__name__"))  # a wrapper has another `__module__`
    else:
        home = getattr(func, "__module__", None) or ""  # methods of tensors have none
    if home.startswith(_OPERATORS):
        namespace = home.removeprefix(_OPERATORS)
        return name if namespace in _NAMESPACES else f"{namespace}.{name}"
    package = home.partition(".")[0]
    return name if package in ("", "torch", "gact_graph") else f"{package}.{name}"


@functools.lru_cache(maxsize=4096)  # as above
def _bare_name_of(func: Callable[..., Any]) -> str:
    name: str = getattr(func, "__name__", type(func).__name__)
    return name.strip("_")


@functools.cache
def _function(name: str) -> Callable[[], None]:
    """Return a function of this name, always the same object: functions are keys of caches."""

    def function() -> None: ...

    function.__name__ = name
    return function


_unseen = _function("function")  # the function of a call that no function mode saw


def _without_dispatch(func: Any) -> FunctionType:
    """Return a Python function of torch without its check for a function mode.

    It is made for one call: functions that it calls may be patched at any time.
    """
    names = {name for name in func.__code__.co_names if name.startswith("has_torch_function")}
    namespace = func.__globals__ | dict.fromkeys(names, lambda *args: False)
    arguments = func.__code__, namespace, func.__name__, func.__defaults__, func.__closure__
    function = FunctionType(*arguments)
    function.__kwdefaults__ = func.__kwdefaults__
    return function
