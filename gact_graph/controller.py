"""One controller a wrapped model: it opens a session for each training forward."""

from __future__ import annotations

import functools
import inspect
import weakref
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks

from gact_graph import hooks, recompute
from gact_graph.adaptation import Adaptation
from gact_graph.blocks.layers import Blocks
from gact_graph.config import Config
from gact_graph.heap import give_back
from gact_graph.report import LayerRow, Report
from gact_graph.scheme import Scheme
from gact_graph.session import Session
from gact_graph.streams import CudaStreams
from gact_graph.swap import Swap, Swapping


class Controller:
    """The state of one wrapped model: settings, seed counter, last report, hooks.

    It holds no reference to the model, and tensors only while a forward waits to be
    measured; so it is copied and pickled with the model.
    """

    def __init__(self, config: Config, model: nn.Module) -> None:
        self.config = config
        self.owner = hooks.Owner()
        self.forwards = 0
        self.report = Report(empty=True)
        self.scheme = Scheme(config.bits, config.pin)
        adaptive = config.adaptive and config.quantize
        self.adaptation = Adaptation(self.scheme, config.adapt_interval) if adaptive else None
        self.swapping = Swapping(CudaStreams()) if config.swap else None
        self.layers: dict[str, LayerRow] = {}
        size = config.blocks_or_default
        self.blocks = (
            None if size is None else Blocks(self.owner, self.layers, size, config.quantize)
        )
        self._handles: list[Any] = [*hooks.attach(self.owner, model)]
        if self.blocks is not None:
            self._handles += self.blocks.attach(model)
        if config.recompute:
            self._handles += recompute.attach(
                self.owner, self.layers, model, blocks=self.blocks is not None
            )

    def remove_hooks(self) -> None:
        """Takes the hooks off the submodules."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    @property
    def session(self) -> Session | None:
        """The session of this model that captures on this thread."""
        return hooks.session_of(self.owner)

    @contextmanager
    def capture(
        self, model: nn.Module, inputs: Any = (), adopt_inputs: bool = False
    ) -> Iterator[Session]:
        """Compresses what autograd saves inside, and reports if it ends without an exception."""
        session = self._session(model, inputs, adopt_inputs=adopt_inputs)
        self.next_forward()
        if self.config.quantize:
            give_back(next(model.parameters()).device)
        self.forwards += 1
        with _capturing(session):
            yield session
        self.report = Report(
            session.rows,
            variance_ratio=self.scheme.variance_ratio,
            passes=0 if self.adaptation is None else self.adaptation.passes,
            swaps_from=None if self.swapping is None else self.swapping.least,
            **self._of_layers(),
        )
        self.scheme.see(session.rows)
        for row in session.rows:
            row.sensitivity = self.scheme.sensitivity_of(row.slot)

    @contextmanager
    def replay(self, model: nn.Module, inputs: Any, reseed: str | None) -> Iterator[None]:
        """The same without a trace: for a forward that is run again to measure."""
        with _capturing(self._session(model, inputs, reseed=reseed)):
            yield

    def measure(self, model: nn.Module, forward: Callable[..., Any]) -> None:
        """Finds the bits by what was recorded, if that is due."""
        if self.adaptation is not None:
            self.adaptation.measure(model, forward, functools.partial(self.replay, model))

    def next_forward(self) -> None:
        """Tells the layers that a forward starts."""
        self.layers.clear()
        if self.blocks is not None:
            self.blocks.orders.next_forward()

    def _of_layers(self) -> dict[str, Any]:
        found: dict[str, Any] = {"layers": [*self.layers.values()]}
        if self.blocks is not None:
            orders = self.blocks.orders
            found |= {"order_bytes": orders.nbytes, "order_seconds": orders.seconds}
        return found

    def _session(self, model: nn.Module, inputs: Any, **options: Any) -> Session:
        swap = None if self.swapping is None else Swap(self.swapping)
        return Session(
            self.config, self.scheme, self.owner, self.forwards, model, inputs, swap=swap, **options
        )


@contextmanager
def _capturing(session: Session) -> Iterator[None]:
    outer = hooks.current()
    with ExitStack() as stack:
        stack.callback(session.close)
        stack.callback(hooks.set_current, outer)
        hooks.set_current(session)
        stack.enter_context(saved_tensors_hooks(session.pack, hooks.unpack))
        stack.enter_context(session.trace)
        yield


class CompressedForward:
    """Stands in for ``model.forward`` as an attribute of the instance; the class stays as it is.

    A stand-in and not a pair of hooks, because only ``with`` survives a KeyboardInterrupt.
    """

    def __init__(self, model: nn.Module, controller: Controller) -> None:
        self.controller = controller
        self.previous: Callable[..., Any] | None = vars(model).get("forward")
        # A strong reference would make a cycle, and keep a deleted model until the next collection.
        self._model = weakref.ref(model)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        model = self._model()
        assert model is not None  # whoever calls this attribute holds the model
        if not should_compress(model):
            self.controller.next_forward()
            return self.inner(*args, **kwargs)
        session = self.controller.session
        if session is not None:  # called from within, or inside gact_graph.compress
            session.own_leaves((args, kwargs))
            return self.inner(*args, **kwargs)
        self.controller.measure(model, self.inner)
        adaptation = self.controller.adaptation
        recording = None if adaptation is None else adaptation.record(model, args, kwargs)
        with self.controller.capture(model, (args, kwargs)) as session:
            output = self.inner(*args, **kwargs)
            session.settle(model, (args, kwargs), output)
        if recording is not None:
            recording.watch(output)
        return output

    @property
    def inner(self) -> Callable[..., Any]:
        """The forward that was there before."""
        if self.previous is not None:
            return self.previous
        model = self._model()
        assert model is not None
        return functools.partial(type(model).forward, model)

    @property
    def __signature__(self) -> inspect.Signature:
        return inspect.signature(self.inner)

    def __getstate__(self) -> dict[str, Any]:
        return {"controller": self.controller, "previous": self.previous, "model": self._model()}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.controller = state["controller"]
        self.previous = state["previous"]
        self._model = weakref.ref(state["model"])


def should_compress(model: nn.Module) -> bool:
    """Contexts are saved for training alone. Compilers trace operations, not hooks."""
    return model.training and torch.is_grad_enabled() and not torch.compiler.is_compiling()
