"""The controller of a wrapped model: it opens a session for each training forward."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Container, Iterable, Iterator
from contextlib import contextmanager
from time import monotonic
from typing import Any, Final, NamedTuple

import torch
from torch import nn

from gact_graph.adaptive.sensitivity import Measurement
from gact_graph.api.report import Report
from gact_graph.api.step import Ended, Step
from gact_graph.api.tracked import TrackedMethod
from gact_graph.capture import module_hooks
from gact_graph.capture.compiled import CompiledForward
from gact_graph.capture.config import Config
from gact_graph.capture.moments import Moments
from gact_graph.capture.noise import Noise
from gact_graph.capture.session import Session, session_of
from gact_graph.capture.uncompressed import Counted
from gact_graph.codecs.compared import MeasuredWidths
from gact_graph.codecs.offload.files import Files
from gact_graph.codecs.offload.streams import CudaStreams
from gact_graph.codecs.offload.swap import Swap, Swapping
from gact_graph.layers.blocks.layers import Blocks
from gact_graph.layers.halo.exchange import Exchange
from gact_graph.layers.recompute import layers as recompute
from gact_graph.support import current
from gact_graph.support.exact import ReadInForwardError, RestorePoint
from gact_graph.support.memory.policy import memory_policy
from gact_graph.support.messages import Advise, warn
from gact_graph.support.patch import Patch
from gact_graph.support.rows import RECOMPUTED, Row
from gact_graph.support.storage import tensors_in


class Call(NamedTuple):
    """A call of a tracked method in training.

    Attributes:
        method: The full name of the method.
        module: The module of the method, or a replica.
        inputs: The positional and the named arguments; None if unknown.
        forward: The original method of the module.
        advise: Returns advice if the step runs out of memory.
    """

    method: str
    module: nn.Module
    inputs: Any
    forward: Any = None
    advise: Advise | None = None


class Controller:
    """The state of a wrapped model: settings, seed counter, last report, hooks.

    Several threads may run the model at once: each call has its own session, shared state changes
    under a lock, and the report describes the call that ended last.

    The controller holds no reference to the model and no tensor of it, so that it is copied and
    pickled with the model.

    Args:
        config: The settings.
        model: The model that gets hooks.

    Attributes:
        config: The settings.
        idle: Whether the model runs uncompressed.
        methods: The tracked methods by their full names.
        forwards: The number of compressed calls, a part of the seed of the noise.
        exchange: Fetches rows of other parts of a partitioned graph; None without a partition.
        moments: Records the memory of the next step; None to record nothing.
    """

    def __init__(self, config: Config, model: nn.Module) -> None:
        self.owner: Final = current.Owner()
        self.forwards: int = 0
        self.exchange: Exchange | None = None
        self.moments: Moments | None = None
        self.methods: dict[str, TrackedMethod] = {}
        self._lock = threading.RLock()
        self._warned = False
        self._patches: list[Patch] = []
        self._hooks: list[Any] = []
        self._remove_at_death()
        self._set_up(config, model)
        self.track("forward")
        self._attach_to(model)

    def _set_up(self, config: Config, model: nn.Module) -> None:
        self.config = config
        self.idle: bool = False
        self._report = Report(empty=True)
        self.swapping: Swapping | None = None
        self._choose_swapping(model)
        self._step = Step(config)
        self._compiled: CompiledForward | None = None
        size, layers = config.block_size, self._step.layers
        self.blocks: Blocks | None = (
            None
            if size is None
            else Blocks(
                self.owner, layers, size, config.quantize, self._min_bytes, config.keep_results
            )
        )

    def _choose_swapping(self, model: nn.Module) -> None:
        """Swap to host memory or to files, by the device of a model, which may have moved."""
        if not self.config.swap:
            return
        on_cuda = _is_on_cuda(model)
        if self.swapping is None or isinstance(self.swapping.streams, CudaStreams) != on_cuda:
            self.swapping = (
                Swapping(CudaStreams()) if on_cuda else Swapping(Files(), prefetch=False)
            )

    def configure(self, config: Config, model: nn.Module, idle: bool = False) -> None:
        """Change the settings between two steps, and forget all measurements.

        Args:
            config: The settings.
            model: The wrapped model.
            idle: Whether the model runs uncompressed.
        """
        with self._lock:
            self.remove_hooks()
            self._set_up(config, model)
            self.idle = idle
            self.forget()
            if not self.idle:
                self._attach_to(model)
            elif not self.owner.tracked:  # hooks warn of a backward without a tracked forward
                self._hooks += module_hooks.attach(self.owner, model)

    def forget(self) -> None:
        """Forget bits, sensitivities, saved bytes and orders of edges."""
        for method in self.methods:
            self.track(method)
        if self.blocks is not None:
            self.blocks.forget()

    def __getstate__(self) -> dict[str, Any]:
        left_out = "_lock", "_references"
        state = {name: value for name, value in vars(self).items() if name not in left_out}
        return state | {"_compiled": None}  # its graphs belong to this model

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self._lock = threading.RLock()
        self._remove_at_death()

    def _remove_at_death(self) -> None:
        """Remove hooks and patches when the controller dies: other models may share its modules.

        Patches may refer to a module, so that the finalizer must not.
        """
        self._references = [*map(weakref.ref, self._patches)]
        weakref.finalize(self, _remove, self._hooks, self._references).atexit = False

    def track(self, method: str) -> None:
        """Track a method, by its full name, from an initial state."""
        self.methods[method] = TrackedMethod.under(self.config)

    def share(self, exchange: Exchange) -> None:
        """Run on a part of a graph from now on."""
        self.exchange = exchange
        for method in self.methods.values():
            if method.adaptation is not None:
                method.adaptation.has_part = True

    @property
    def report(self) -> Report:
        """The report of the last call, with the latest measurements."""
        self._report = self._step.with_measured(self._report, self.methods)
        return self._report

    @property
    def session(self) -> Session | None:
        """The session of this model on this thread; None if nothing is captured."""
        return session_of(self.owner)

    def warn_of_compiler(self) -> None:
        """Warn once that a model that was compiled later trains uncompiled."""
        if not self._warned:
            self._warned = True
            warn(
                "A wrapped model was compiled: with a memory budget, and at level L0, its training "
                "forwards run uncompiled. To compile them, compile the model first and wrap the "
                "result: gact_graph.wrap(torch.compile(model))."
            )

    # Hooks on the submodules.

    def _attach_to(self, model: nn.Module) -> None:
        try:
            self._attach(model)
        except BaseException:
            self.remove_hooks()
            raise

    def _attach(self, model: nn.Module, only: Container[nn.Module] | None = None) -> None:
        # After an error in a generator, the lists hold what came before it, to be removed.
        self._hooks.extend(module_hooks.attach(self.owner, model, only))
        if self.blocks is not None:
            self._keep(self.blocks.attach(model, only))
        if self.config.recompute:
            self._keep(recompute.attach(self.owner, self._step.layers, model, only))

    def _keep(self, patches: Iterable[Patch]) -> None:
        for patch in patches:
            self._patches.append(patch)
            self._references.append(weakref.ref(patch))

    def remove_hooks(self) -> None:
        """Remove the hooks from the submodules, and return kept memory to the system."""
        _remove(self._hooks, self._references)
        self._patches.clear()
        memory_policy.end()

    # Calls of tracked methods.

    def run(self, call: Call) -> Any:
        """Return the result of a call, which runs uncompressed if compression would save little."""
        tracked, measurement = self.methods[call.method], None
        if tracked.adaptation is not None:
            with self._lock:
                tracked.adaptation.next_step(call.module)
        if tracked.is_small(self._min_bytes):
            return self._run_uncompressed(call)
        measures = tracked.is_large(self._min_bytes) and not tracked.exact_slots.interrupted
        if tracked.adaptation is not None and measures:
            with self._lock:
                measurement = tracked.adaptation.begin(call.module, self._lock)
        return self._run_captured(call, measurement)

    def _run_captured(self, call: Call, measurement: Measurement | None) -> Any:
        """Run a call; again, without compression, if it differentiates compressed tensors."""
        point = RestorePoint(call.module, call.inputs) if self.config.quantize else None
        widths = None if measurement is None else measurement.widths
        adaptation = self.methods[call.method].adaptation
        try:
            with self._capturing(call, widths, point) as session:
                output = session.run(call.forward, *call.inputs)
        except ReadInForwardError:
            if point is None:
                raise
        else:
            if measurement is not None and adaptation is not None:
                reason = measurement.watch(tensors_in(output), tensors_in(call.inputs))
                if reason is not None:
                    with self._lock:
                        adaptation.cancel(reason)
            return output
        point.restore()
        self.methods[call.method].exact_slots.warn_of_rerun()
        with _not_recoverable(), self._capturing(call, all_exact=True) as session:
            return session.run(call.forward, *call.inputs)

    @contextmanager
    def capturing(self, model: nn.Module) -> Iterator[None]:
        """Compress the tensors that autograd saves inside the context, by any part of a model."""
        memory_policy.start_step(model)
        with _not_recoverable(), self._capturing(Call("forward", model, inputs=None)):
            yield

    @contextmanager
    def _capturing(
        self,
        call: Call,
        widths: MeasuredWidths | None = None,
        restore_point: RestorePoint | None = None,
        all_exact: bool = False,
    ) -> Iterator[Session]:
        """Compress the tensors that autograd saves inside the context, and report on success."""
        method, model = call.method, call.module
        tracked = self.methods[method]
        self.owner.tracked = True
        with self._lock:
            if "." not in method:  # a method of the model itself
                added = module_hooks.without_hooks(self.owner, model)
                if added and self.exchange is not None:
                    raise ValueError(
                        "Expected the layers that were there at wrap(model, partition=part) (got "
                        f"a new {type(next(iter(added))).__name__}); unwrap the model, change its "
                        "layers, and wrap it again"
                    )
                if added:
                    self._attach(model, added)
            self._choose_swapping(model)
            spare = 0 if tracked.is_large(self._min_bytes) else self._min_bytes
            repeated, adaptation = tracked.inputs.see(call.inputs), tracked.adaptation
            if adaptation is not None and not repeated:
                adaptation.row_weights.clear()
            exact = tracked.exact_slots
            all_exact, exact.interrupted = all_exact or exact.interrupted, False
            session = Session(
                self.config,
                tracked.scheme,
                self.owner,
                Noise(self.config.seed, self.forwards, repeated),
                model,
                call.inputs,
                swap=None if self.swapping is None else Swap(self.swapping),
                row_weights=None if adaptation is None else adaptation.row_weights,
                widths=widths,
                spare=spare,
                exact_slots=exact,
                all_exact=all_exact,
                restore_point=restore_point,
                places=None if self.blocks is None else tracked.places,
                sparse_products=None if self.blocks is None else self.blocks.sparse_product,
                layers=self._step.layers,
                advise=call.advise,
                moments=self.moments,
            )
            self._start(method)
        start = monotonic()
        with session.capturing():
            part = method.rpartition(".")[0]
            if part:
                session.trace.enter(part)
            yield session
        seconds = _seconds_since(start, model)
        with self._lock:
            tracked.scheme.see(session.rows)
            allocated = (row.raw_bytes for row in session.rows if row.codec != RECOMPUTED)
            saved = sum(allocated) + session.unallocated
            # Small tensors, and those that are kept exactly for once, show no more than their own.
            if not spare and saved >= self._min_bytes and not session.keeps_all_exact:
                tracked.see(session.rows, saved)
            self._end(method, session.rows, saved, seconds, is_small=spare > 0)
            # A step may have several contexts of gact_graph.compress.
            complete = call.inputs is not None
            complete &= all(m.saved_bytes is not None for m in self.methods.values())
            self._step.check_pins(session.rows, complete)

    def run_compiled(self, call: Call) -> Any:
        """Run a call of a compiled model, whose graphs encode the tensors that they save."""
        tracked, (args, kwargs) = self.methods[call.method], call.inputs
        self.owner.tracked = True
        with self._lock:
            if self._compiled is None:
                self._compiled = CompiledForward(self.config)
            compiled = self._compiled
            repeated = tracked.inputs.see(call.inputs)
            noise = Noise(self.config.seed, self.forwards, repeated)
            self._start(call.method)
        start = monotonic()
        with compiled.running(noise) as running:
            output = call.forward(*args, **kwargs)
        seconds = _seconds_since(start, call.module)
        rows = compiled.end(running, call.inputs, repeated, output, call.module)
        with self._lock:
            if self.blocks is not None:
                self._step.layers.update(self.blocks.in_graphs)
            raw = sum(row.raw_bytes for row in rows)
            self._end(call.method, rows, raw, seconds, is_small=False)
        return output

    def _run_uncompressed(self, call: Call) -> Any:
        """Run a call that is expected to save little, and keep the tensors that autograd saves."""
        self.owner.tracked = True
        with self._lock:
            self._start(call.method)
        counted, start = Counted(call.inputs), monotonic()
        args, kwargs = call.inputs
        with current.uncompressed(self.owner, counted.pack):
            output = call.forward(*args, **kwargs)
        seconds = _seconds_since(start, call.module)
        raw = counted.raw_bytes(call.module, self._min_bytes)
        row = Row(call.method, "other", "keep", (), 0, None, raw, raw)
        with self._lock:
            self._end(call.method, [row], raw, seconds, is_small=True)
        return output

    def _start(self, method: str) -> None:
        self._step.start(method)
        if self.blocks is not None:
            self.blocks.next_forward()
        self.forwards += 1

    def _end(
        self, method: str, rows: list[Row], saved: int, seconds: float | None, is_small: bool
    ) -> None:
        self.methods[method].saved_bytes = saved
        self._step.end(method, Ended(rows, seconds, self._min_bytes if is_small else None))
        self._report = self._step.report(self.blocks, self.swapping)

    def next_forward(self) -> None:
        """Notify the layers of the start of an uncompressed forward."""
        self._step.layers.clear()
        if self.blocks is not None:
            self.blocks.next_forward()

    @property
    def _min_bytes(self) -> int:
        return self.config.min_bytes if self.config.exact else 0


def _seconds_since(start: float, model: nn.Module) -> float | None:
    """Return the duration of a forward; None on CUDA, where kernels outlast the call."""
    on_cuda = torch.cuda.is_initialized() and _is_on_cuda(model)
    return None if on_cuda else monotonic() - start


def _is_on_cuda(model: nn.Module) -> bool:
    return any(parameter.is_cuda for parameter in model.parameters())


@contextmanager
def _not_recoverable() -> Iterator[None]:
    """Turn a read of compressed tensors in forward into an error: running again would not help."""
    try:
        yield
    except ReadInForwardError:
        raise RuntimeError(
            "Expected a forward that differentiates only its own results (got a derivative that "
            "needs compressed tensors of an earlier call); run the step again, since these are "
            "kept exactly from now on, or use level='lossless'"
        ) from None


def _remove(hooks: list[Any], references: list[weakref.ref[Patch]]) -> None:
    patches = [patch for reference in references if (patch := reference()) is not None]
    for handle in (*reversed(patches), *reversed(hooks)):
        handle.remove()
    references.clear()
    hooks.clear()
