"""What a module's attribute holds at one moment, and how a replica of the module has it again."""

from __future__ import annotations

import copy
import functools
import types
import weakref
from collections import OrderedDict, defaultdict, deque
from typing import Any, NoReturn, Protocol

import torch
from torch import Tensor, nn

from gact_graph.support.patch import BoundPatch, Patch
from gact_graph.support.storage import version_of

QUICK = frozenset({list, dict, set, OrderedDict, defaultdict, deque})
"""Containers whose own ``copy`` takes a tenth of the time: a module has twenty of them."""


class Target(Protocol):
    """The replica that is being made.

    Attributes:
        own: Whether tensors are copied.
        parts: Its modules.
        parameters: Its tensors that learn.
        indices: Indices of its modules in ``parts``, by the ids of the originals.
        memo: What was thawed already: what was one object in the original is one in the replica.
    """

    own: bool
    parts: list[nn.Module]
    parameters: list[Tensor]
    indices: dict[int, int]
    memo: dict[int, Any]


class Frozen:
    """How to have a value in a replica."""

    def thaw(self, target: Target) -> Any:
        """The value for this replica."""
        raise NotImplementedError


def thaw(value: Any, target: Target) -> Any:
    """A frozen value thawed, the same one each time; any other value as it is."""
    if not isinstance(value, Frozen):
        return value
    memo, key = target.memo, id(value)
    if key not in memo:
        memo[key] = value.thaw(target)
    return memo[key]


class Learning(Frozen):
    """A tensor that learns."""

    def __init__(self, index: int) -> None:
        self._index = index

    def thaw(self, target: Target) -> Tensor:
        return target.parameters[self._index]


class Part(Frozen):
    """A module."""

    def __init__(self, index: int) -> None:
        self._index = index

    def thaw(self, target: Target) -> nn.Module:
        return target.parts[self._index]


class Copied(Frozen):
    """A tensor whose values were copied at that moment."""

    def __init__(self, tensor: Tensor) -> None:
        self._tensor = tensor.detach().clone()

    def thaw(self, target: Target) -> Tensor:
        return self._tensor.clone()


class Held(Frozen):
    """A tensor that must not have changed since.

    Args:
        tensor: The tensor.
        name: Of the attribute that holds it.
        weak: Whether it may be gone when the replica is made.
    """

    def __init__(self, tensor: Tensor, name: str, weak: bool) -> None:
        self._tensor: Any = weakref.ref(tensor) if weak else tensor
        self._version = version_of(tensor)
        self._name = name

    def thaw(self, target: Target) -> Any:
        tensor = self._tensor() if isinstance(self._tensor, weakref.ref) else self._tensor
        if tensor is None:
            return _Lost(self._name, "deleted")
        if version_of(tensor) != self._version:
            return _Lost(self._name, "changed in place")
        copied = target.own and not isinstance(tensor, nn.Parameter)
        return tensor.clone() if copied and not tensor.requires_grad else tensor


class PatchOf(Frozen):
    """A patch of one of the modules, which runs on the replica that it is called through."""

    def __init__(self, patch: Patch | BoundPatch, index: int) -> None:
        self._patch, self._index = patch, index

    def thaw(self, target: Target) -> BoundPatch:
        return self._patch.bound_to(target.parts[self._index])


class Reference(Frozen):
    """A bound method of a module, or a weak reference to one."""

    def __init__(self, value: Any, module: nn.Module) -> None:
        self._module = weakref.ref(module)
        self._function = value.__func__ if isinstance(value, types.MethodType) else None

    def thaw(self, target: Target) -> Any:
        module = self._module()
        index = target.indices.get(id(module))
        module = module if index is None else target.parts[index]
        if self._function is not None and module is not None:
            return types.MethodType(self._function, module)
        return self._module if index is None else weakref.ref(target.parts[index])


class Partial(Frozen):
    """A ``functools.partial`` of such a method, or with such arguments."""

    def __init__(self, func: Any, args: Any, keywords: Any) -> None:
        self._func, self._args, self._keywords = func, args, keywords

    def thaw(self, target: Target) -> Any:
        func, args = thaw(self._func, target), thaw(self._args, target)
        return functools.partial(func, *args, **thaw(self._keywords, target))


class Shallow(Frozen):
    """A copy of a container of values that stay as they are."""

    def __init__(self, value: Any) -> None:
        # Of a subclass, it may give something else.
        self._copy = type(value).copy if type(value) in QUICK else copy.copy
        self._value = self._copy(value)

    def thaw(self, target: Target) -> Any:
        return self._copy(self._value)


class Items(Frozen):
    """A container of frozen values."""

    def __init__(self) -> None:
        self._empty: Any = None
        self._items: Any = None

    def fill(self, value: Any, items: list[Any]) -> None:
        """Takes the container, and what is in it, frozen; of a mapping keys and values."""
        self._items = items
        if isinstance(value, tuple | frozenset | set):
            self._empty = type(value)
        else:
            self._empty = copy.copy(value)
            self._empty.clear()

    def thaw(self, target: Target) -> Any:
        if isinstance(self._empty, type):
            items = [thaw(item, target) for item in self._items]
            named = issubclass(self._empty, tuple) and hasattr(self._empty, "_fields")
            return self._empty(*items) if named else self._empty(items)
        found = target.memo[id(self)] = copy.copy(self._empty)  # it may hold itself
        if isinstance(found, list | deque):
            found.extend(thaw(item, target) for item in self._items)
        else:
            for key, item in self._items:
                found[thaw(key, target)] = thaw(item, target)
        return found


class _Lost:
    """In place of a tensor that is not what it was: whatever reads it raises."""

    def __init__(self, name: str, fate: str) -> None:
        vars(self).update(_name=name, _fate=fate)

    def _raise(self, *args: Any, **kwargs: Any) -> NoReturn:
        raise RuntimeError(
            "one of the variables needed for gradient computation has been modified: the tensor in "
            f"the attribute {vars(self)['_name']} of a layer that is computed again in backward "
            f"was {vars(self)['_fate']} since forward. Change it after backward, or take a level "
            "that computes nothing again (level='L1', blocks=False)."
        )

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = [*args, *(kwargs or {}).values()]
        inside = [i for g in given if isinstance(g, tuple | list) for i in g]
        next(one for one in [*given, *inside] if isinstance(one, cls))._raise()

    __getattr__ = __getitem__ = __len__ = __iter__ = __bool__ = __float__ = __int__ = _raise
    __add__ = __sub__ = __mul__ = __truediv__ = __matmul__ = __neg__ = __pow__ = _raise


def containers() -> tuple[type, ...]:
    """The kinds of containers that are copied; subclasses are, too."""
    return (list, tuple, dict, set, frozenset, deque)


def is_scripted(module: nn.Module) -> bool:
    """Whether the module lives in TorchScript: it stands for itself in a replica."""
    return isinstance(module, torch.jit.ScriptModule)
