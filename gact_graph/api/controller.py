"""One controller for each wrapped model: it opens a session for each training forward."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Container, Iterator
from contextlib import contextmanager
from time import monotonic
from typing import Any

from torch import nn

from gact_graph.api.followed import Followed
from gact_graph.api.report import Report
from gact_graph.api.step import Step
from gact_graph.capture import module_hooks
from gact_graph.capture.config import Config
from gact_graph.capture.noise import Noise
from gact_graph.capture.session import Session
from gact_graph.capture.uncompressed import Counted
from gact_graph.codecs.compared import Widths
from gact_graph.codecs.offload.streams import CudaStreams
from gact_graph.codecs.offload.swap import Swap, Swapping
from gact_graph.layers.blocks.layers import Blocks
from gact_graph.layers.blocks.orders import Orders
from gact_graph.layers.halo.exchange import Exchange
from gact_graph.layers.recompute import layers as recompute
from gact_graph.support import current
from gact_graph.support.advising import Advise
from gact_graph.support.exact import ReadInForwardError, Start
from gact_graph.support.memory.policy import memory_policy
from gact_graph.support.rows import NOT_MADE, Row
from gact_graph.support.storage import tensors_in
from gact_graph.support.warn import warn

Forward = Callable[[nn.Module], Callable[..., Any]]


class Controller:
    """The state of one wrapped model: settings, seed counter, last report, hooks.

    Several threads may run the model at once: each call has a session of its own, and what they
    share is changed under a lock, measuring too. The report is that of the call that ended last.

    It holds no reference to the model, and no tensor; so it is copied and pickled with the model.

    Attributes:
        config: The settings.
        idle: Whether the model runs as it is, nothing being compressed.
        followed: The methods that are followed, by their full names.
        forward: The model's own forward among them.
        forwards: How many calls were compressed: part of the noise's seed.
        exchange: What fetches rows of a graph that is cut into parts, if it is.
    """

    def __init__(self, config: Config, model: nn.Module) -> None:
        self.owner = current.Owner()
        self.forwards = 0
        self.exchange: Exchange | None = None
        self.followed: dict[str, Followed] = {}
        self._lock = threading.RLock()
        self._warned = False
        self._handles: list[Any] = []
        self._hooks: list[Any] = []  # apart: these hold no module
        self._take_hooks_along()
        self._set_up(config)
        self.forward = self.follow("forward")
        self._attach_to(model)

    def _set_up(self, config: Config) -> None:
        self.config = config
        self.idle = False
        self._report = Report(empty=True)
        self.swapping = Swapping(CudaStreams()) if config.swap else None
        self._step = Step(config)
        size, layers = config.block_size, self._step.layers
        self.blocks = (
            None
            if size is None
            else Blocks(self.owner, layers, size, config.quantize, self._min_bytes)
        )

    def configure(self, config: Config | None, model: nn.Module) -> None:
        """Takes other settings, between two steps. What was measured is forgotten.

        Args:
            config: The settings; None: the model runs as it is, and ``idle`` is set.
            model: The wrapped model.
        """
        with self._lock:
            self.remove_hooks()
            self._set_up(self.config if config is None else config)
            self.idle = config is None
            self.forget()
            if not self.idle:
                self._attach_to(model)
            elif not self.owner.followed:  # then hooks warn of a backward that nothing was done for
                self._hooks += module_hooks.attach(self.owner, model)

    def forget(self) -> None:
        """Forget what calls have shown: bits, sensitivities, saved bytes and orders of edges."""
        for method in self.followed:
            self.follow(method)
        self.forward = self.followed["forward"]
        if self.blocks is not None:
            self.blocks.orders = Orders()

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name != "_lock"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self._lock = threading.RLock()
        self._take_hooks_along()

    def _take_hooks_along(self) -> None:
        """Removes the hooks when this dies: a module that other models share outlives the model."""
        weakref.finalize(self, _remove, self._hooks).atexit = False

    def follow(self, method: str) -> Followed:
        """Starts to follow a method, by its full name."""
        self.followed[method] = Followed.under(self.config)
        return self.followed[method]

    def share(self, exchange: Exchange) -> None:
        """Runs on a part of a graph from now on."""
        self.exchange = exchange
        for followed in self.followed.values():
            if followed.adaptation is not None:
                followed.adaptation.has_part = True

    @property
    def report(self) -> Report:
        """The report of the last call, with what backward has measured since."""
        self._report = self._step.with_measured(self._report, self.followed)
        return self._report

    @property
    def session(self) -> current.Capture | None:
        """The session of this model that captures on this thread."""
        return current.session_of(self.owner)

    def warn_of_compiler(self) -> None:
        """Says once that a forward which was to be compiled is not."""
        if not self._warned:
            self._warned = True
            warn(
                "A wrapped model was compiled: its training forwards are compressed and run "
                "uncompiled. To have both, compile first and wrap what that gives: "
                "gact_graph.wrap(torch.compile(model))."
            )

    # Hooks on the submodules.

    def _attach_to(self, model: nn.Module) -> None:
        try:
            self._attach(model)
        except BaseException:
            self.remove_hooks()
            raise

    def _attach(self, model: nn.Module, only: Container[nn.Module] | None = None) -> None:
        # One by one: what fails halfway is removed again.
        for handle in module_hooks.attach(self.owner, model, only):
            self._hooks.append(handle)
        if self.blocks is not None:
            for layer in self.blocks.attach(model, only):
                self._handles.append(layer)
        if self.config.recompute:
            blocks, layers = self.blocks is not None, self._step.layers
            for recomputed in recompute.attach(self.owner, layers, model, blocks, only):
                self._handles.append(recomputed)

    def remove_hooks(self) -> None:
        """Takes the hooks off the submodules, and returns memory that is kept for steps to come."""
        _remove(self._handles)
        _remove(self._hooks)
        memory_policy.end()

    # One call of a method that is followed.

    def start_step(self, model: nn.Module) -> None:
        """A step of the model begins: memory that it frees is kept for the next one."""
        memory_policy.start_step(model)

    def run(
        self,
        method: str,
        module: nn.Module,
        original: Forward,
        args: Any,
        kwargs: Any,
        advise: Advise | None = None,
    ) -> Any:
        """Calls a method in training: compressed, or left alone where little can be taken.

        Args:
            method: The method's full name, as it is followed.
            module: The module that has it.
            original: Gives the method that was there before, as that of the module or a replica.
            args: Of the call.
            kwargs: Of the call.
            advise: Tells what to do where the step runs out of memory.

        Returns:
            What the method returns.
        """
        followed, forward = self.followed[method], original(module)
        if followed.adaptation is not None:
            with self._lock:
                followed.adaptation.next_step(module)
        if followed.is_small(self._min_bytes):
            return self._run_uncompressed(method, module, forward, args, kwargs)
        measurement = None
        if followed.adaptation is not None and followed.is_large(self._min_bytes):
            with self._lock:
                measurement = followed.adaptation.begin(module, self._lock)
        widths = None if measurement is None else measurement.widths
        output = self._run_captured(method, module, forward, (args, kwargs), advise, widths)
        if measurement is not None:
            measurement.watch(tensors_in(output), tensors_in((args, kwargs)))
        return output

    def _run_captured(
        self,
        method: str,
        module: nn.Module,
        forward: Callable[..., Any],
        inputs: tuple[Any, Any],
        advise: Advise | None,
        widths: Widths | None,
    ) -> Any:
        """Calls a method; once more, without noise, if it differentiates what has some."""
        args, kwargs = inputs
        start = Start(module) if self.config.quantize else None
        try:
            with self._capturing(method, module, inputs, advise, widths, start) as session:
                return session.run(forward, args, kwargs)
        except ReadInForwardError:
            if start is None:
                raise
        start.restore()
        self.followed[method].exactly.warn_of_rerun()
        again = self._capturing(method, module, inputs, advise, all_exactly=True)
        with _not_again(), again as session:
            return session.run(forward, args, kwargs)

    @contextmanager
    def capturing(self, model: nn.Module) -> Iterator[None]:
        """Compresses what autograd saves meanwhile, whichever parts of the model are called."""
        self.start_step(model)
        with _not_again(), self._capturing("forward", model, None):
            yield

    @contextmanager
    def _capturing(
        self,
        method: str,
        model: nn.Module,
        inputs: Any,
        advise: Advise | None = None,
        widths: Widths | None = None,
        start: Start | None = None,
        all_exactly: bool = False,
    ) -> Iterator[Session]:
        """Compresses what autograd saves inside, and reports if it ends without an exception."""
        followed = self.followed[method]
        self.owner.followed = True
        with self._lock:
            if "." not in method:  # of the model itself
                later = module_hooks.without_hooks(self.owner, model)
                if later:
                    self._attach(model, later)
            is_large = followed.is_large(self._min_bytes)
            spare = 0 if is_large else self._min_bytes
            session = self._session(
                model, inputs, followed, widths, spare, advise, start, all_exactly
            )
            self._start(method)
        begun = monotonic()
        with session.capturing():
            part = method.rpartition(".")[0]
            if part:
                session.trace.enter(part)
            yield session
        seconds = _seconds_since(begun, model)
        with self._lock:
            followed.scheme.see(session.rows)
            made = (row.raw_bytes for row in session.rows if row.codec != NOT_MADE)
            saved = sum(made) + session.not_made
            if not spare:
                followed.see(session.rows, saved)
            self._end(method, session.rows, saved, seconds, left_alone=spare > 0)
            complete = all(f.saved_bytes is not None for f in self.followed.values())
            self._step.check_pins(session.rows, complete)

    def _run_uncompressed(
        self, method: str, model: nn.Module, forward: Callable[..., Any], args: Any, kwargs: Any
    ) -> Any:
        """Keeps what autograd saves as it is, in a call that is expected to save little."""
        self.owner.followed = True
        with self._lock:
            self._start(method)
        counted, begun = Counted((args, kwargs)), monotonic()
        with current.leaving_alone(self.owner, counted.pack):
            output = forward(*args, **kwargs)
        seconds = _seconds_since(begun, model)
        raw = counted.raw_bytes(model, self._min_bytes)
        row = Row(method, "other", "keep", (), 0, None, raw, raw)
        with self._lock:
            self._end(method, [row], raw, seconds, left_alone=True)
        return output

    def _start(self, method: str) -> None:
        self._step.start(method)
        if self.blocks is not None:
            self.blocks.orders.next_forward()
        self.forwards += 1

    def _end(
        self,
        method: str,
        rows: list[Row],
        saved_bytes: int,
        seconds: float | None,
        left_alone: bool,
    ) -> None:
        self.followed[method].saved_bytes = saved_bytes
        self._step.end(method, rows, seconds)
        self._report = self._step.report(
            self.blocks,
            self.swapping,
            spared_below=self._min_bytes if left_alone else None,
        )

    def next_forward(self) -> None:
        """Tells the layers that a forward starts which is not compressed."""
        self._step.layers.clear()
        if self.blocks is not None:
            self.blocks.orders.next_forward()

    @property
    def _min_bytes(self) -> int:
        return self.config.min_bytes if self.config.exact else 0

    def _session(
        self,
        model: nn.Module,
        inputs: Any,
        followed: Followed,
        widths: Widths | None,
        spare: int,
        advise: Advise | None,
        start: Start | None,
        all_exactly: bool,
    ) -> Session:
        return Session(
            self.config,
            followed.scheme,
            self.owner,
            Noise(self.config.seed, self.forwards),
            model,
            inputs,
            swap=None if self.swapping is None else Swap(self.swapping),
            widths=widths,
            spare=spare,
            exactly=followed.exactly,
            all_exactly=all_exactly,
            start=start,
            layers=self._step.layers,
            advise=advise,
        )


def _seconds_since(begun: float, model: nn.Module) -> float | None:
    """What a forward took; None on CUDA, whose kernels run on after it has returned."""
    on_cuda = any(parameter.is_cuda for parameter in model.parameters())
    return None if on_cuda else monotonic() - begun


@contextmanager
def _not_again() -> Iterator[None]:
    """Inside, a forward that needs compressed tensors of an earlier call cannot run once more."""
    try:
        yield
    except ReadInForwardError:
        raise RuntimeError(
            "Expected a forward that differentiates nothing but what it has computed itself (got "
            "one that needs tensors of an earlier call, which are compressed); run the step again, "
            "for they are kept exactly from now on, or take level='lossless'"
        ) from None


def _remove(handles: list[Any]) -> None:
    for handle in reversed(handles):
        handle.remove()
    handles.clear()
