"""The patch of a method that is followed: it tells when a call is compressed."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Mapping
from typing import Any, Protocol

import torch
from torch import nn
from torch.jit._trace import is_tracing

from gact_graph.api.controller import Controller
from gact_graph.layers.halo.layers import Handle
from gact_graph.support import current
from gact_graph.support.advising import Advise, advising
from gact_graph.support.patch import Patch
from gact_graph.support.transforms import is_transformed


class Named(Protocol):
    """A way to train."""

    @property
    def name(self) -> str: ...


class Budget(Protocol):
    """What chooses the way to train."""

    @property
    def way(self) -> Named | None:
        """The one that was chosen."""

    def prepare(self, patch: CompressedForward, module: nn.Module, args: Any, kwargs: Any) -> None:
        """Sees to it that the model trains in a way that fits, before a call of a method."""

    def state_dict(self) -> dict[str, Any] | None:
        """The way, as plain values."""

    def load_state_dict(self, state: Mapping[str, Any] | None, patch: CompressedForward) -> None:
        """Takes the way of another run."""


Adviser = Callable[["CompressedForward", nn.Module, int, Any, Any], Advise]
"""Of a call: its patch, its module, the bytes that were taken when it began, and its arguments."""


_living: weakref.WeakSet[CompressedForward] = weakref.WeakSet()


class CompressedForward(Patch):
    """Replaces a method that is followed, as an attribute of the instance.

    A pair of hooks would not do: only ``with`` survives a KeyboardInterrupt.

    Args:
        module: The wrapped model, or a part of it.
        controller: The model's.
        part: The part's name in the model; empty for the model itself.
        method: The method's name.

    Attributes:
        budget: Of the first patch, what chooses the way to train, if there is a budget.
        adviser: Of the first patch, what will tell a user who is out of memory what to do.
        halo: Of the first patch, what undoes the patches of layers that fetch rows of others.
        first: The patch of the model's own forward.
        others: Of that one, those of the other methods.
    """

    def __init__(
        self, module: nn.Module, controller: Controller, part: str = "", method: str = "forward"
    ) -> None:
        self.controller = controller
        self.part = part
        self.budget: Budget | None = None
        self.adviser: Adviser | None = None
        self.halo: list[Handle] = []
        self.first = self
        self.others: list[CompressedForward] = []
        self._method = f"{part}.{method}" if part else method
        if self._method not in controller.followed:
            controller.follow(self._method)
        super().__init__(module, method)
        _living.add(self)

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        _living.add(self)

    @staticmethod
    def living() -> list[CompressedForward]:
        """All that are held anywhere, those of copies too."""
        return list(_living)

    def run(self, module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        """Runs in place of the method of ``module``."""
        forward = self.original(module)  # of a copy it may be none that can run
        if torch.compiler.is_compiling() or is_tracing():
            exported = is_tracing() or torch.compiler.is_exporting()
            if exported or not _trains(module):
                return forward(*args, **kwargs)
            return _uncompiled(self, module, args, kwargs)
        controller = self.controller
        if not should_compress(module):
            controller.next_forward()
            return forward(*args, **kwargs)
        session = controller.session
        if session is not None:  # called from within, or inside gact_graph.compress
            session.own_leaves((args, kwargs))
            with session.running():
                return forward(*args, **kwargs)
        if current.is_left_alone(controller.owner):
            return forward(*args, **kwargs)
        if self.first.budget is not None:
            self.first.budget.prepare(self, module, args, kwargs)
        model = self.first.module  # whose truth may be that of its length
        controller.start_step(module if model is None else model)
        if controller.idle:
            return forward(*args, **kwargs)
        before = torch.cuda.memory_allocated() if torch.cuda.is_initialized() else 0
        adviser = self.first.adviser
        advise = None if adviser is None else adviser(self, module, before, args, kwargs)
        with advising(advise):
            return controller.run(self._method, module, self.original, args, kwargs, advise)

    @property
    def __code__(self) -> Any:
        # torch.export reads the signature's place from it.
        module = self.module
        assert module is not None
        forward = self.original(module)
        forward = forward.func if isinstance(forward, functools.partial) else forward
        return getattr(forward, "__func__", forward).__code__

    @property
    def __globals__(self) -> Any:
        # torch.jit.script asks for this first, and could not compile the hooks either.
        raise AttributeError(
            "Expected a model that is not wrapped, to script it (got a wrapped one): script what "
            "gact_graph.unwrap(model) gives; gact_graph.wrap(model) wraps it again"
        )


def should_compress(model: nn.Module) -> bool:
    """Contexts are saved for training alone. Compilers trace operations, not hooks."""
    return _trains(model) and not torch.compiler.is_compiling() and not is_transformed()


def _trains(model: nn.Module) -> bool:
    return model.training and torch.is_grad_enabled()


@torch.compiler.disable(
    reason="a wrapped model follows each operation, which a compiled graph hides; compile the "
    "model first and wrap what that gives: gact_graph.wrap(torch.compile(model))"
)
def _uncompiled(forward: CompressedForward, module: nn.Module, args: Any, kwargs: Any) -> Any:
    """A training forward of a model that was compiled after it was wrapped."""
    forward.controller.warn_of_compiler()
    return forward.run(module, *args, **kwargs)
