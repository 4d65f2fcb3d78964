"""Patches of methods: attributes of one instance, so that its class stays as it is."""

from __future__ import annotations

import functools
import inspect
import threading
import types
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

_local = threading.local()


class Patch:
    """Replaces a method of one module, as an attribute of it.

    It runs on the module that it is called through. Such an attribute does not get that module as
    a method gets ``self``; so a hook before the module's forward looks who runs, and gives a
    shallow copy (``copy.copy``, or a replica of ``DataParallel``) a :class:`BoundPatch`.

    Args:
        module: The module. A strong reference would make a cycle, and keep a deleted model until
            the next collection; so there is a weak one.
        attribute: The method's name.
    """

    def __init__(self, module: nn.Module, attribute: str) -> None:
        self.attribute = attribute
        self.previous: Callable[..., Any] | None = vars(module).get(attribute)
        self._module = weakref.ref(module)
        self._handle = module.register_forward_pre_hook(_Rebind(attribute))
        setattr(module, attribute, self)

    @property
    def module(self) -> nn.Module | None:
        """The module that it was made for, if that lives."""
        return self._module()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        through = getattr(_local, "through", {}).pop(id(self), None)
        module = self.module if through is None else through()
        if module is None:
            raise RuntimeError(
                f"Expected {self.attribute} of a module that lives (got one of a deleted module, "
                "called past the copy that it was found in); call the copy itself"
            )
        return self.run(module, *args, **kwargs)

    def run(self, module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        """Runs in place of the method of ``module``."""
        raise NotImplementedError

    def original(self, module: nn.Module) -> Callable[..., Any]:
        """The method of ``module`` that was there before.

        Raises:
            RuntimeError: It was an attribute of the instance itself, of which nothing tells how it
                would run on another module.
        """
        if self.previous is None:
            # Not a bound method: after a graph break a compiler would fetch that by its name, and
            # find this patch.
            return functools.partial(getattr(type(module), self.attribute), module)
        if module is self.module:
            return self.previous
        return rebound(self.previous, self.module, module)

    def bound_to(self, module: nn.Module) -> BoundPatch:
        """The same for another module, which shares what was found out."""
        return BoundPatch(self, module)

    def remove(self) -> None:
        """Puts back what was there before."""
        self._handle.remove()
        module = self.module
        if module is not None and vars(module).get(self.attribute) is self:
            delattr(module, self.attribute)
            if self.previous is not None:
                setattr(module, self.attribute, self.previous)

    @property
    def __signature__(self) -> inspect.Signature:
        module = self.module
        assert module is not None
        return inspect.signature(self.original(module))

    def __getstate__(self) -> dict[str, Any]:
        return vars(self) | {"_module": self.module}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self._module = weakref.ref(state["_module"])


class BoundPatch:
    """A patch that runs on another module than the one it was made for."""

    def __init__(self, patch: Patch, module: nn.Module) -> None:
        self.patch = patch
        self._module = weakref.ref(module)

    @property
    def module(self) -> nn.Module | None:
        return self._module()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        module = self.module
        assert module is not None  # whoever calls this attribute holds the module
        return self.patch.run(module, *args, **kwargs)

    def bound_to(self, module: nn.Module) -> BoundPatch:
        """The same for another module."""
        return BoundPatch(self.patch, module)

    @property
    def __signature__(self) -> inspect.Signature:
        module = self.module
        assert module is not None
        return inspect.signature(self.patch.original(module))

    def __getstate__(self) -> dict[str, Any]:
        return {"patch": self.patch, "_module": self.module}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.patch = state["patch"]
        self._module = weakref.ref(state["_module"])


class _Rebind:
    """Hook before a module's forward, which copies of the module share with it."""

    def __init__(self, attribute: str) -> None:
        self._attribute = attribute

    def __call__(self, module: nn.Module, args: Any) -> None:
        if torch.compiler.is_compiling():
            return
        found = vars(module).get(self._attribute)
        if isinstance(found, Patch | BoundPatch) and found.module is not module:
            vars(module)[self._attribute] = found.bound_to(module)
            if self._attribute == "forward":  # it was fetched already
                if not hasattr(_local, "through"):
                    _local.through = {}
                _local.through[id(found)] = weakref.ref(module)


def rebound(
    method: Callable[..., Any], old: nn.Module | None, new: nn.Module
) -> Callable[..., Any]:
    """A method of ``old``, found as an attribute of it, as one of ``new``.

    Raises:
        RuntimeError: It is none.
    """
    if isinstance(method, Patch | BoundPatch):
        return method.bound_to(new)
    if isinstance(method, types.MethodType) and method.__self__ is old:
        return types.MethodType(method.__func__, new)
    raise RuntimeError(
        f"Expected a forward of the class, or a bound method (got {method!r} as an attribute of a "
        f"{type(new).__name__}), for it is to run on a copy of that module"
    )
