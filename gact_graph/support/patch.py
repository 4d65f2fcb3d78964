"""Patches of methods, as attributes of one instance: its class does not change."""

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


class _Replacement:
    """A callable that replaces a method of a module.

    The module holds the replacement as an attribute. A strong reference back would make a cycle,
    and keep a deleted model until the next collection.
    """

    def __init__(self, module: nn.Module) -> None:
        self._module = weakref.ref(module)

    @property
    def module(self) -> nn.Module | None:
        """The module; None if it is deleted."""
        return self._module()

    @property
    def patch(self) -> Patch:
        """The patch that runs in place of the method."""
        raise NotImplementedError

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        through = getattr(_local, "through", {}).pop(id(self), None)
        module = self.module if through is None else through()
        if module is None:
            raise RuntimeError(
                f"Expected {self.patch.attribute} of an existing module (got the method of a "
                "deleted module, through a shallow copy); call the copy itself"
            )
        return self.patch.run(module, *args, **kwargs)

    def bound_to(self, module: nn.Module) -> BoundPatch:
        """Return a replacement for a copy of the module, which shares the state of the patch."""
        return BoundPatch(self.patch, module)

    @property
    def __signature__(self) -> inspect.Signature:
        module = self.module
        assert module is not None
        return inspect.signature(self.patch.original(module))

    def __getstate__(self) -> dict[str, Any]:
        return vars(self) | {"_module": self.module}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self._module = weakref.ref(state["_module"])


class Patch(_Replacement):
    """Replace a method of one module.

    An attribute does not get the module of the call, as a method gets ``self``. So a hook before
    forward gives each shallow copy (``copy.copy``, or a replica of ``DataParallel``) a
    :class:`BoundPatch`.

    Args:
        module: The module.
        attribute: The name of the method.

    Attributes:
        removed: Whether :meth:`remove` was called. A decorator may still call the patch.
    """

    def __init__(self, module: nn.Module, attribute: str) -> None:
        super().__init__(module)
        self.attribute = attribute
        self.removed: bool = False
        self.previous: Callable[..., Any] | None = vars(module).get(attribute)
        self._handle = module.register_forward_pre_hook(_Rebind(attribute))
        setattr(module, attribute, self)

    @property
    def patch(self) -> Patch:
        return self

    def run(self, module: nn.Module, /, *args: Any, **kwargs: Any) -> Any:
        """Run in place of the method of ``module``."""
        raise NotImplementedError

    def original(self, module: nn.Module) -> Callable[..., Any]:
        """Return the method of ``module`` from before the patch.

        Raises:
            RuntimeError: If it is a function that cannot run on a copy of its module.
        """
        if self.previous is None:
            # Not a bound method: after a graph break, a compiler would fetch a bound method by
            # name, and find this patch.
            return functools.partial(getattr(type(module), self.attribute), module)
        if module is self.module:
            return self.previous
        if isinstance(self.previous, _Replacement):
            return self.previous.bound_to(module)
        if isinstance(self.previous, types.MethodType) and self.previous.__self__ is self.module:
            return types.MethodType(self.previous.__func__, module)
        raise RuntimeError(
            f"Expected a method of the class, or a bound method (got {self.previous!r} as an "
            f"attribute of a {type(module).__name__}), to run it on a copy of the module"
        )

    def remove(self) -> None:
        """Restore the method from before the patch."""
        self._handle.remove()
        self.removed = True
        module = self.module
        outer = None if module is None else vars(module).get(self.attribute)
        if module is not None and outer is self:
            delattr(module, self.attribute)
            if self.previous is not None:
                setattr(module, self.attribute, self.previous)
        while isinstance(outer, Patch):  # of another model that shares the module
            if outer.previous is self:
                outer.previous = self.previous
            outer = outer.previous


class BoundPatch(_Replacement):
    """Run a patch on a copy of its module."""

    def __init__(self, patch: Patch, module: nn.Module) -> None:
        super().__init__(module)
        self._patch = patch

    @property
    def patch(self) -> Patch:
        return self._patch


class _Rebind:
    """Hook before a module's forward, which copies of the module share."""

    def __init__(self, attribute: str) -> None:
        self._attribute = attribute

    def __call__(self, module: nn.Module, args: Any) -> None:
        if torch.compiler.is_compiling():
            return
        method = vars(module).get(self._attribute)
        if isinstance(method, _Replacement) and method.module is not module:
            vars(module)[self._attribute] = method.bound_to(module)
            if self._attribute == "forward":  # PyTorch has fetched the method already
                if not hasattr(_local, "through"):
                    _local.through = {}
                _local.through[id(method)] = weakref.ref(module)
        elif isinstance(method, _Replacement):
            # Of a copy's call that raised before forward.
            getattr(_local, "through", {}).pop(id(method), None)
