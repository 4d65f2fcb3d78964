"""A replica of a module: a forward that runs on it leaves no trace in the module.

``torch.nn.parallel.replicate`` makes such replicas for several devices: new objects of the same
classes, with what the originals hold. What a forward sets (an attribute, a counter, a cache, the
statistics of a batch norm) lands in the replica. The user's module is never touched, so other
threads, an exception or a KeyboardInterrupt cannot meet it half-way changed.
"""

from __future__ import annotations

import functools
import types
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from gact_graph.support.freeze import (
    QUICK,
    Copied,
    Frozen,
    Held,
    Items,
    Learning,
    Part,
    Partial,
    PatchOf,
    Reference,
    Shallow,
    containers,
    is_scripted,
    thaw,
)
from gact_graph.support.graph import ends_of, nodes_before
from gact_graph.support.patch import BoundPatch, Patch
from gact_graph.support.reach import Reach, Unknowable, Watch, attributes, slots_of
from gact_graph.support.storage import version_of

_PLAIN = frozenset({bool, int, float, complex, str, bytes, type(None), type, types.FunctionType})
_CONTAINERS: tuple[Any, ...] = containers()
# As tuples: a union would be made anew at each of the many tests.
_PATCHES = (Patch, BoundPatch)
_REFERENCES = (types.MethodType, weakref.ref)
_FIXED = (tuple, frozenset)

_COPIED_BYTES = 1 << 18
"""Buffers up to this size have memory of their own in every snapshot and replica: the statistics of
a normalisation change while the layer runs, and must be what they were when it runs again."""

_MANY = 1000
"""Items of a container above which nobody looks for modules and tensors among them."""

_INSIDE = {"DistributedDataParallel": "module", "OptimizedModule": "_orig_mod"}
"""Modules that run another one and more: collectives, compiled code. Their replicas run only that
one. By the names of their classes, for importing these takes long."""


class CannotReplicate(Exception):
    """A module must run as it is; the message says why."""


class Snapshot:
    """What a module and all modules inside it hold at one moment, to make replicas of.

    Parameters and buffers are held, with their versions. Of other tensors in attributes there is
    only a weak reference: an old cache must not live until backward. Where one of them is gone or
    was changed when a replica is made, the replica raises as soon as that tensor is used.

    Args:
        module: The module.

    Attributes:
        learning: The leaf tensors that require a gradient (of replicas that
            ``torch.nn.parallel.replicate`` made: their parameters), each once.

    Raises:
        CannotReplicate: A submodule has parameters without values yet (a lazily initialised layer
            before its first forward), or buffers that live in TorchScript.
    """

    def __init__(self, module: nn.Module) -> None:
        self.learning: list[Tensor] = []
        self._learns: dict[int, int] = {}
        self.parts: list[nn.Module] = []
        self.names: list[str] = []
        self.indices: dict[int, int] = {}
        self._memo: dict[int, tuple[Any, Any]] = {}
        self._add_part(module, "")
        self.states: list[_State] = []
        while len(self.states) < len(self.parts):  # attributes may hold further ones
            index = len(self.states)
            self.states.append(self._state_of(index))
        self._memo.clear()
        # All that replicas need of the originals.
        self.kinds = [m if is_scripted(m) else type(m) for m in self.parts]

    @property
    def modes(self) -> tuple[bool, ...]:
        """Of each module, whether it was training."""
        return tuple(bool(state.held.get("training")) for state in self.states)

    @contextmanager
    def replica(
        self,
        values: Sequence[Tensor] | None = None,
        *,
        aliases: bool = False,
        own: bool = False,
        watch: bool = False,
    ) -> Iterator[Replica]:
        """A replica, for as long as the context lasts.

        Args:
            values: What :attr:`learning` were, in that order, if not what they are.
            aliases: Whether all that learns is aliases, leaves with the same memory: for a backward
                that accumulates, so that ``grad`` and hooks of the originals rest. Else originals
                serve: what reaches them past the replica (a closure, say) has its gradient, too.
                Only for one with hooks there is an alias, or they would run once more.
            own: Whether all other tensors are copies, so that a first try can do no harm.
            watch: Whether :meth:`Replica.changes` and :meth:`Replica.undo` will be asked.

        Raises:
            CannotReplicate: For one that is watched: its code reads something whose state cannot be
                put back.
        """
        replica = Replica(self, values, aliases, own, watch)
        try:
            yield replica
        finally:
            replica.close()

    def _add_part(self, module: nn.Module, name: str) -> int:
        index = self.indices.setdefault(id(module), len(self.parts))
        if index < len(self.parts):
            return index
        self.parts.append(module)
        self.names.append(name)
        if is_scripted(module) and any(True for _ in module.buffers()):
            raise CannotReplicate("has a scripted submodule with buffers")
        for tensor in _parameters_of(module):
            if is_lazy(tensor):
                raise CannotReplicate("has parameters that its first forward initialises")
            if tensor.requires_grad:
                self._add_learning(tensor)
        if not is_scripted(module):
            for child, inside in module._modules.items():
                if inside is not None:
                    self._add_part(inside, f"{name}.{child}" if name else child)
        return index

    def _add_learning(self, tensor: Tensor) -> int:
        index = self._learns.setdefault(id(tensor), len(self.learning))
        if index == len(self.learning):
            self.learning.append(tensor)
        return index

    def _state_of(self, index: int) -> _State:
        module, name = self.parts[index], self.names[index]
        state = _State({}, [])
        if is_scripted(module):
            return state
        dot = f"{name}." if name else ""
        for key, buffer in module._buffers.items():
            if buffer is not None and id(buffer) not in self._memo:
                self._remember(buffer, self._buffer(buffer, dot + key))
        for key, value in attributes(module).items():
            kind = type(value)
            if kind in _PLAIN:
                state.held[key] = value
                continue
            if kind in QUICK and not value:  # most of what a module has
                frozen = self._empty(value)
            elif isinstance(value, _PATCHES):
                frozen = PatchOf(value, index)
            else:
                frozen = self._freeze(value, dot + key)
            if isinstance(frozen, Frozen):
                state.frozen.append((key, frozen))
            state.held[key] = frozen
        return state

    def _empty(self, value: Any) -> Any:
        known = self._memo.get(id(value))
        if known is None:
            known = self._memo[id(value)] = value, Shallow(value)
        return known[1]

    def _buffer(self, buffer: Tensor, name: str) -> Frozen:
        if is_lazy(buffer):
            raise CannotReplicate("has buffers that its first forward initialises")
        if buffer.requires_grad or buffer.nbytes > _COPIED_BYTES:
            return self._hold(buffer, name, weak=False)
        return Copied(buffer)

    def _freeze(self, value: Any, name: str) -> Any:
        """The value itself, if it cannot change, or how to have it in a replica."""
        if type(value) in _PLAIN:
            return value
        if id(value) not in self._memo:
            self._remember(value, self._frozen(value, name))
        return self._memo[id(value)][1]

    def _remember(self, value: Any, frozen: Any) -> None:
        self._memo[id(value)] = value, frozen  # held, so that its id stays its own

    def _frozen(self, value: Any, name: str) -> Any:
        if type(value) in QUICK and not value:
            return Shallow(value)
        if isinstance(value, Tensor):
            if value.requires_grad and (value.is_leaf or id(value) in self._learns):
                return Learning(self._add_learning(value))
            return self._hold(value, name, weak=not isinstance(value, nn.Parameter))
        if isinstance(value, nn.Module):
            return Part(self._add_part(value, name))
        if isinstance(value, _CONTAINERS):
            return self._container(value, name)
        if isinstance(value, _REFERENCES):
            module = value() if isinstance(value, weakref.ref) else value.__self__
            return Reference(value, module) if isinstance(module, nn.Module) else value
        if isinstance(value, functools.partial):
            parts = (value.func, value.args, value.keywords)
            return Partial(*(self._freeze(part, name) for part in parts))
        return value

    def _hold(self, tensor: Tensor, name: str, weak: bool) -> Held:
        return Held(tensor, name, weak)

    def _container(self, value: Any, name: str) -> Any:
        fixed = isinstance(value, _FIXED)
        if not value or len(value) > _MANY:
            return value if fixed else Shallow(value)
        found = Items()
        self._remember(value, found)  # it may hold itself
        mapping = isinstance(value, dict)
        given: list[Any] = [i for item in value.items() for i in item] if mapping else [*value]
        items = [self._freeze(item, name) for item in given]
        if all(a is b for a, b in zip(items, given, strict=True)):
            return value if fixed else Shallow(value)
        found.fill(value, [*zip(items[::2], items[1::2], strict=True)] if mapping else items)
        return found


class _State(NamedTuple):
    """What one module holds: all of it by name, and once more what is frozen."""

    held: dict[str, Any]
    frozen: list[tuple[str, Frozen]]


class Replica:
    """See :meth:`Snapshot.replica`.

    Attributes:
        module: In place of the module.
        parameters: In place of :attr:`Snapshot.learning`, in that order.
    """

    def __init__(
        self,
        snapshot: Snapshot,
        values: Sequence[Tensor] | None,
        aliases: bool,
        own: bool,
        watch: bool,
    ) -> None:
        self.own = own
        self.memo: dict[int, Any] = {}
        self.indices = snapshot.indices
        given = snapshot.learning if values is None else values
        self.parameters = [
            _leaf(tensor, value, aliases)
            for tensor, value in zip(snapshot.learning, given, strict=True)
        ]
        self.parts = [_shell(kind, aliases) for kind in snapshot.kinds]
        self.module = self.parts[0]
        self._names = snapshot.names
        for part, state in zip(self.parts, snapshot.states, strict=True):
            if is_scripted(part):  # it stands for itself
                continue
            fields = vars(part)
            fields.update(state.held)  # all of them, in their order
            for name, value in state.frozen:
                fields[name] = thaw(value, self)
            kind: Any = type(part)
            for name in slots_of(kind):
                if name in fields:
                    object.__setattr__(part, name, fields.pop(name))
            inside = _inside_of(kind)
            if inside is not None and inside in part._modules:
                vars(part)["forward"] = part._modules[inside]
            vars(part).pop("_compiled_call_impl", None)  # it would run the original
        self._before = [_marks(part) for part in self.parts] if watch else None
        self._reach = self._reached() if watch else None

    def _reached(self) -> Watch:
        own = {id(value) for value in (*self.memo.values(), *self.parts)}
        try:
            return Reach([self.module], own=own).watch()
        except Unknowable as reason:
            raise CannotReplicate(str(reason)) from reason

    def undo(self) -> str | None:
        """Puts back what was changed past the replica; gives the name of one such thing, or None.

        For a replica that is watched.
        """
        return None if self._reach is None else self._reach.undo()

    def changes(self) -> dict[str, Any]:
        """The attributes and buffers, by full name, that are not what they were when it was made.

        With their values; None for one that is gone. For a replica that is watched.
        """
        assert self._before is not None
        found = {}
        for name, part, before in zip(self._names, self.parts, self._before, strict=True):
            now = _marks(part)
            for key in before.keys() | now.keys():
                if key not in before or key not in now or before[key][1] != now[key][1]:
                    found[f"{name}.{key}" if name else key] = now.get(key, (None,))[0]
        return found

    @property
    def buffers(self) -> dict[str, bool]:
        """The names of all buffers, and whether the replica shares their memory."""
        return {
            f"{name}.{key}" if name else key: buffer.nbytes > _COPIED_BYTES
            for name, part in zip(self._names, self.parts, strict=True)
            for key, buffer in part._buffers.items()
            if buffer is not None
        }

    def close(self) -> None:
        """Lets go of all that it holds, for that may hold the replica.

        What was changed past one that is watched is put back.
        """
        self.undo()
        for part in self.parts:
            if not is_scripted(part):
                vars(part).clear()
        self.parts, self.parameters, self._before, self._reach = [], [], None, None
        self.memo.clear()


def leaves_of(outputs: Sequence[Tensor]) -> Iterator[Tensor]:
    """The leaf tensors to which gradients of these outputs flow."""
    for node in nodes_before(ends_of(outputs)):
        variable = getattr(node, "variable", None)
        if variable is not None:
            yield variable


@functools.lru_cache(maxsize=1024)
def _inside_of(kind: Any) -> str | None:
    names = (one.__name__ for one in kind.__mro__)
    return next((_INSIDE[name] for name in names if name in _INSIDE), None)


def _parameters_of(module: nn.Module) -> Iterator[Tensor]:
    """Its own; a replica of ``torch.nn.parallel.replicate`` has tensors of a graph instead."""
    if is_scripted(module):
        yield from module.parameters()
        return
    for named in (module._parameters, vars(module).get("_former_parameters", {})):
        yield from (tensor for tensor in named.values() if tensor is not None)


def _leaf(tensor: Tensor, value: Tensor, alias: bool) -> Tensor:
    same = value is tensor or (
        value.data_ptr() == tensor.data_ptr()
        and (value.shape, value.dtype) == (tensor.shape, tensor.dtype)
    )
    learns = tensor.requires_grad and tensor.is_leaf
    if alias or not same or not learns or tensor._backward_hooks:
        return nn.Parameter(value.detach())
    return tensor


def _shell(kind: Any, alone: bool) -> Any:
    if isinstance(kind, nn.Module):  # a scripted one stands for itself
        return kind
    if alone and issubclass(kind, nn.SyncBatchNorm):
        kind = _Alone
    return object.__new__(kind)


class _Alone(nn.modules.batchnorm._BatchNorm):
    """In place of a SyncBatchNorm, whose statistics the other ranks would have to take part in."""

    def _check_input_dim(self, input: Tensor) -> None: ...


def _marks(part: nn.Module) -> dict[str, tuple[Any, Any]]:
    """By name the attributes, each held so that its id stays its own, and what tells a change."""
    found: dict[str, tuple[Any, Any]] = {}
    held = {} if is_scripted(part) else attributes(part)
    for name, value in held.items():
        if name in ("_parameters", "_buffers"):
            found |= {key: (item, _mark(item)) for key, item in value.items()}
        else:
            found[name] = value, _mark(value)
    return found


def _mark(value: Any, depth: int = 2) -> Any:
    kind = type(value)
    if kind in _PLAIN:
        return value
    if kind in QUICK and not value:
        return id(value), ()
    if isinstance(value, Tensor):
        return id(value), version_of(value)
    if depth and isinstance(value, dict):
        return id(value), [*value], [_mark(item, depth - 1) for item in value.values()]
    if depth and isinstance(value, _CONTAINERS):
        return id(value), [_mark(item, depth - 1) for item in value]
    return id(value)
