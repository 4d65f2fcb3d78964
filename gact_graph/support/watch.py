"""The recorded state of objects, to find and undo changes."""

from __future__ import annotations

import functools
import math
import pickle
import random
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy
import torch
from torch import Tensor, nn

from gact_graph.support.objects import (
    CONTAINERS,
    COPIED_BYTES,
    DYNAMIC,
    GENERATORS,
    NAMESPACES,
    State,
    attributes,
    cell_contents,
    home_of,
    is_library,
    is_plain_value,
    items,
    joined,
    module_attributes,
    named,
)
from gact_graph.support.storage import is_plain, version_of

_BIAS_BYTES = 8192


class _Record(NamedTuple):
    """An object: the path to it, its state at first, and how to read and restore the state."""

    name: str
    before: State
    read: Callable[[], State]
    restore: Callable[[State], Any]


class _TensorRecord(NamedTuple):
    """A tensor: the path to it, its state, and a copy of its values unless it is too large."""

    name: str
    tensor: Tensor
    version: int | None
    requires_grad: bool
    copy: Tensor | None

    @property
    def changed(self) -> bool:
        return version_of(self.tensor) != self.version

    def restore(self) -> None:
        if self.tensor.is_leaf and self.tensor.requires_grad != self.requires_grad:
            self.tensor.requires_grad_(self.requires_grad)
        # By its values: batch norm writes statistics without a new version. A read-only map in the
        # memory of a CPU must not be written, nor shared memory without need.
        if self.copy is not None and not (
            self.tensor.device.type == "cpu" and torch.equal(self.tensor, self.copy)
        ):
            self.tensor.data.copy_(self.copy)


class Watch:
    """The state of objects, recorded when the watch is made.

    Args:
        objects: The objects, each with the path to it.
        names: The names of attributes, class attributes and globals that are recorded.
        whole_modules: Whether all attributes and buffers of a module are recorded, and not only
            those with these names.
        copied_bytes: The most bytes of a tensor that is copied.
    """

    def __init__(
        self,
        objects: Sequence[tuple[Any, str]],
        names: frozenset[str],
        whole_modules: bool,
        copied_bytes: float,
    ) -> None:
        self._objects = objects
        self._names, self._whole_modules = names, whole_modules
        self._copied_bytes = copied_bytes
        self._records: list[_Record] = []
        self._tensors: list[_TensorRecord] = []
        for value, name in objects:
            self._add(value, name)

    def again(self) -> Watch:
        """Record the present state of the same objects."""
        return Watch(self._objects, self._names, self._whole_modules, self._copied_bytes)

    def undo(self) -> str | None:
        """Undo all changes; return the name of a changed object, or None without changes."""
        first = None
        for record in self._records:
            changed = [*_changed(record.read(), record.before)]
            if changed:
                record.restore(record.before)
                first = first or joined(record.name, changed[0])
        for tensor in self._tensors:
            if tensor.changed:
                first = first or tensor.name
            tensor.restore()
        return first

    def changed_tensor(self) -> str | None:
        """Return the name of a tensor above 256 KiB that has changed since, or None.

        If there is none, copies of such tensors are released.
        """
        kept = []
        for record in self._tensors:
            if not _is_small(record.tensor, COPIED_BYTES):
                if record.changed:
                    return record.name
                record = record._replace(copy=None)
            kept.append(record)
        self._tensors = kept
        return None

    def lost_tensor(self) -> str | None:
        """Return the name of a tensor that has changed since and has no copy, or None."""
        return next((t.name for t in self._tensors if t.copy is None and t.changed), None)

    def _add(self, value: Any, name: str) -> None:
        if isinstance(value, types.ModuleType):
            if not is_library(value.__name__):
                self._add_names(value, lambda: vars(value), name, self._names)
        elif isinstance(value, type):
            for kind in value.__mro__:
                if not is_library(kind.__module__):
                    self._add_names(kind, functools.partial(vars, kind), kind.__name__, self._names)
        elif isinstance(value, types.FunctionType):
            if not is_library(home_of(value)):
                self._add_names(value, lambda: vars(value), value.__name__, self._names)
                names = self._names if "globals" in self._names else self._names - DYNAMIC
                self._add_names(value.__globals__, lambda: value.__globals__, "", names)
        elif isinstance(value, types.CellType):
            self._record(name, lambda: cell_contents(value), lambda old: _fill(value, old))
        elif isinstance(value, Tensor):
            small = _is_small(value, self._copied_bytes)
            copy = value.detach().clone() if small else None
            state = version_of(value), value.requires_grad
            self._tensors.append(_TensorRecord(name, value, *state, copy))
            self._add_names(value, lambda: vars(value), name, self._names)
        elif (numbers := _numbers(value)) is not None:
            self._record(name, *numbers)
        elif isinstance(value, nn.Module | CONTAINERS | NAMESPACES) or not is_library(
            type(value).__module__
        ):
            self._add_object(value, name)

    def _add_object(self, value: Any, name: str) -> None:
        if not isinstance(value, nn.Module):
            self._add_names(value, lambda: attributes(value), name, self._names)
        else:
            names = None if self._whole_modules else self._names
            self._add_names(value, lambda: module_attributes(value), name, names)
            for group in ("_parameters", "_buffers", "_modules"):
                held = vars(value).get(group, {})
                self._add_names(held, functools.partial(dict, held), name, names)
        fixed = isinstance(value, tuple | frozenset)
        if isinstance(value, CONTAINERS) and not fixed:
            self._record(name, lambda: items(value), lambda old: _refill(value, old))

    def _add_names(
        self,
        owner: Any,
        read: Callable[[], Mapping[str, Any]],
        name: str,
        names: frozenset[str] | None,
    ) -> None:
        """Record what code with these names may change in a mapping; None stands for all of it."""

        def state() -> State:
            return dict(read()) if names is None else named(read(), names)

        self._record(name, state, lambda old: _restore(owner, state(), old))

    def _record(
        self, name: str, read: Callable[[], State], restore: Callable[[State], Any]
    ) -> None:
        self._records.append(_Record(name, read(), read, restore))


def _is_small(tensor: Tensor, most: float) -> bool:
    if isinstance(tensor, nn.Parameter) and math.isfinite(most):
        # An optimizer that steps during backward may change a bias before its layer runs again.
        # Autograd itself checks parameters that it saves.
        most = min(most, _BIAS_BYTES)
    # Inference tensors cannot be written outside of the inference mode.
    if not is_plain(tensor) or tensor.nbytes > most or tensor.is_inference():
        return False
    # An expanded tensor cannot be written. The version shows a change of its base.
    sizes = zip(tensor.shape, tensor.stride(), strict=True)
    return not any(stride == 0 and size > 1 for size, stride in sizes)


def _numbers(value: Any) -> tuple[Callable[[], State], Callable[[State], Any]] | None:
    """Return how to read and restore the state of an array or a random number generator."""
    if isinstance(value, numpy.ndarray):
        if value.nbytes > COPIED_BYTES:
            return dict, lambda _: None
        array = value.copy()
        return lambda: {None: value.tobytes()}, lambda _: numpy.copyto(value, array)
    if isinstance(value, torch.Generator):
        state = value.get_state()
        return lambda: {None: bytes(value.get_state())}, lambda _: value.set_state(state)
    if isinstance(value, random.Random):
        now = value.getstate()
        return lambda: {None: repr(value.getstate())}, lambda _: value.setstate(now)
    if isinstance(value, GENERATORS):
        numpys: Any = value
        bits = numpys._bit_generator
        return lambda: {None: pickle.dumps(bits.state)}, lambda old: setattr(
            bits, "state", pickle.loads(old[None])
        )
    return None


def _fill(cell: types.CellType, contents: State) -> None:
    del cell.cell_contents
    for content in contents.values():
        cell.cell_contents = content


def _refill(container: Any, old: State) -> None:
    container.clear()
    if isinstance(container, dict):
        container.update(old)
    elif isinstance(container, set):
        container.update(old.values())
    else:
        container.extend(old.values())


def _restore(owner: Any, now: State, before: State) -> None:
    """Restore the attributes of an object or a class, or the items of a dictionary."""
    kind: Any = type if isinstance(owner, type) else object
    for key in now.keys() - before.keys():
        if isinstance(owner, dict):
            del owner[key]
        else:
            kind.__delattr__(owner, key)
    for key in {*_changed(now, before)} & before.keys():
        if isinstance(owner, dict):
            owner[key] = before[key]
        else:
            kind.__setattr__(owner, key, before[key])


def _changed(now: State, before: State) -> Iterator[Any]:
    """Yield the names whose objects differ; numbers and strings are compared by value."""
    for key in now.keys() | before.keys():
        if key not in now or key not in before:
            yield key
        elif now[key] is not before[key]:
            plain = is_plain_value(now[key]) and type(now[key]) is type(before[key])
            if not plain or now[key] != before[key]:
                yield key
