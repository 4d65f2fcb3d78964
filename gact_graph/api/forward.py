"""The patch of a tracked method: it decides which calls are compressed."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.jit import is_tracing  # type: ignore[attr-defined]

from gact_graph.api.controller import Call, Controller
from gact_graph.capture.compiled import is_compiled, is_running
from gact_graph.capture.config import Config
from gact_graph.layers.halo.layers import Handle
from gact_graph.support import current
from gact_graph.support.current import is_transformed
from gact_graph.support.memory.policy import memory_policy
from gact_graph.support.messages import Advise, advising
from gact_graph.support.patch import Patch
from gact_graph.support.torch_private import is_exporting, not_compiled, set_compiler

if TYPE_CHECKING:
    from gact_graph.api.budget.budget import Budget

Adviser = Callable[["CompressedForward", nn.Module, int, Any, Any], Advise]
"""Creates the advice for a call from its patch, module, bytes in use before, and arguments."""

_living: weakref.WeakSet[CompressedForward] = weakref.WeakSet()


class CompressedForward(Patch):
    """Replace a tracked method, as an attribute of the instance.

    Unlike a pair of hooks, ``with`` statements inside also end by a KeyboardInterrupt.

    Args:
        module: The wrapped model, or a part of it.
        controller: The controller of the model.
        part: The name of the part; empty for the model itself.
        method: The name of the method.

    Attributes:
        full_name: The name of the method in the model, with that of the part.
        first: The patch of the model's own forward, which has the attributes below.
        others: The patches of the other methods.
        budget: The memory budget; None without a budget.
        adviser: Creates advice for errors of memory; None for no advice.
        halo: Handles of layers that fetch rows of other processes.
    """

    def __init__(self, module: nn.Module, controller: Controller, part: str, method: str) -> None:
        self.controller = controller
        self.part = part
        self.budget: Budget | None = None
        self.adviser: Adviser | None = None
        self.halo: list[Handle] = []
        self.first = self
        self.others: list[CompressedForward] = []
        self.full_name = f"{part}.{method}" if part else method
        if self.full_name not in controller.methods:
            controller.track(self.full_name)
        super().__init__(module, method)
        _living.add(self)

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        _living.add(self)

    @property
    def settings(self) -> Config:
        """The settings without those that the strategy of a budget adds."""
        return self.controller.config if self.budget is None else self.budget.settings_of(None)

    @staticmethod
    def living() -> list[CompressedForward]:
        """Return all existing patches, including those of copied models."""
        return list(_living)

    def run(self, module: nn.Module, /, *args: Any, **kwargs: Any) -> Any:
        """Run in place of the method of ``module``."""
        if torch.compiler.is_compiling() or is_tracing():
            forward = self.original(module)
            exported = is_tracing() or is_exporting()
            if self.removed or exported or not _trains(module):
                return forward(*args, **kwargs)
            return _between_graphs(self, module, args, kwargs)
        compiler = set_compiler(None)
        try:
            return self._run(module, compiler, args, kwargs)
        finally:
            set_compiler(compiler)

    def _run(self, module: nn.Module, compiler: Any, args: Any, kwargs: Any) -> Any:
        """Run outside of the compiler, which compiles at most the method of the model."""
        forward = plain = self.original(module)  # raises for some copies
        if compiler is not None:
            forward = functools.partial(_under, compiler, plain)
        controller = self.controller
        if self.removed:
            return forward(*args, **kwargs)
        parameter = next(module.parameters(), None)
        on_meta = parameter is not None and parameter.is_meta
        if on_meta or not should_compress(module):
            controller.owner.tracked |= on_meta
            controller.next_forward()
            return forward(*args, **kwargs)
        session = controller.session
        if session is not None:  # within another tracked call, or gact_graph.compress
            session.add_inputs((args, kwargs))
            with session.running():
                return plain(*args, **kwargs)
        if current.is_uncompressed(controller.owner) or is_running():
            return forward(*args, **kwargs)
        budget = self.first.budget
        if budget is not None:
            budget.prepare(self, module, args, kwargs)
        model = self.first.module  # `or` would call its __len__
        memory_policy.start_step(module if model is None else model)
        output = self._train(module, plain, forward, args, kwargs)
        if budget is not None:
            budget.watch(output)
        return output

    def _run_bound(self, module: nn.Module, /, *args: Any, **kwargs: Any) -> Any:
        """Run for a decorated method. On a deep copy, which is not wrapped, run the original."""
        if module is self.module:
            return self.run(module, *args, **kwargs)
        return self.original(module)(*args, **kwargs)

    def _train(
        self,
        module: nn.Module,
        plain: Callable[..., Any],
        forward: Callable[..., Any],
        args: Any,
        kwargs: Any,
    ) -> Any:
        """Return the output of a training call of a method, which is ``forward`` if compiled."""
        if self.controller.idle:
            return forward(*args, **kwargs)
        before = torch.cuda.memory_allocated() if torch.cuda.is_initialized() else 0
        adviser = self.first.adviser
        advise = None if adviser is None else adviser(self, module, before, args, kwargs)
        with advising(advise):
            call = Call(self.full_name, module, (args, kwargs), plain, advise)
            is_wrapped_later = is_compiled(module)
            if is_wrapped_later or forward is not plain:
                if self.controller.config.exact and self.first.budget is None:
                    return self.controller.run_compiled(call._replace(forward=forward))
                if not is_wrapped_later:
                    self.controller.warn_of_compiler()
            return self.controller.run(call)

    @property
    def __func__(self) -> Callable[..., Any]:
        # accelerate decorates this function of a method, and binds the result to the model.
        return self._run_bound

    @property
    def __code__(self) -> Any:
        # torch.export reads the location of the signature from the code.
        module = self.module
        assert module is not None
        forward = self.original(module)
        forward = forward.func if isinstance(forward, functools.partial) else forward
        return getattr(forward, "__func__", forward).__code__

    @property
    def __globals__(self) -> Any:
        # torch.jit.script reads this first, and cannot compile the hooks.
        raise AttributeError(
            "Expected a model that is not wrapped, for torch.jit.script (got a wrapped model): "
            "script gact_graph.unwrap(model); gact_graph.wrap(model) wraps it again"
        )


def should_compress(model: nn.Module) -> bool:
    """Return whether calls are compressed: in training, outside of compilers and transforms."""
    return _trains(model) and not torch.compiler.is_compiling() and not is_transformed()


def _trains(model: nn.Module) -> bool:
    return model.training and torch.is_grad_enabled()


@torch.compiler.disable(
    recursive=False,
    reason="a training forward of a wrapped model starts a graph of its own; for a single graph, "
    "compile the model first and wrap the result: gact_graph.wrap(torch.compile(model))",
)
def _between_graphs(forward: CompressedForward, module: nn.Module, args: Any, kwargs: Any) -> Any:
    """Run a training forward of a wrapped model inside a function that is compiled."""
    return forward.run(module, *args, **kwargs)


def _under(compiler: Any, function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
    """Call a function that a compiler looks into, from outside of the compiler."""
    set_compiler(compiler)
    try:
        return function(*args, **kwargs)
    finally:
        set_compiler(None)


# A compiler looks into these where another function inlines them, and else runs them as Python.
not_compiled(CompressedForward.__call__.__code__)
not_compiled(CompressedForward.run.__code__)
