"""A call of a layer in which autograd saves placeholders, and the run that fills them in backward.

As in ``torch.utils.checkpoint`` without reentrant autograd, the layer runs on autograd's own graph
in forward, so hooks, gradients of tensors from elsewhere and higher derivatives are those of stock.
The session saves the inputs, and compresses them; a saved tensor that is an input is decoded
without running the layer.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from gact_graph.codecs import Context, Saved
from gact_graph.codecs.base import Encoded
from gact_graph.layers.recompute.contexts import Waiting
from gact_graph.layers.recompute.runs import Enough, FirstRun, RunAgain, counting, kind_of
from gact_graph.layers.recompute.structure import Structure
from gact_graph.support.current import Capture, Coding, forward_runs, unpack
from gact_graph.support.edits import glimpse_of
from gact_graph.support.messages import Advise
from gact_graph.support.run_state import RunState
from gact_graph.support.storage import Layout, parts_of, tensors_held_by, version_of
from gact_graph.support.torch_private import at_end_of_backward, graph_task_id
from gact_graph.support.watch import Watch

_SHARE = 0.5
"""Results with a row for each edge are saved if each takes at most this share of the bytes of the
layer's floating-point inputs."""


class Placeholder(Saved):
    """The object that autograd holds in place of a tensor that the layer computes again.

    Attributes:
        number: The number of tensors that the layer had saved before.
        kind: The tensor's shape and dtype.
        filled: The tensor, after the layer has run again.
    """

    __slots__ = ("__weakref__", "_recomputation", "filled", "kind", "number")

    def __init__(self, recomputation: Recomputation, number: int, tensor: Tensor) -> None:
        self._recomputation = recomputation
        self.number: int = number
        self.kind: tuple[Any, ...] = kind_of(tensor)
        self.filled: Saved | None = None
        self.slot: str | None = None
        self.advise: Advise | None = recomputation.advise

    @property
    def context(self) -> Context:  # type: ignore[override]
        return self._recomputation.fill(self).context

    @property
    def layout(self) -> Layout | None:  # type: ignore[override]
        return self._recomputation.fill(self).layout

    def tensor(self) -> Tensor:
        return self._recomputation.fill(self).tensor()


class Recomputation:
    """One call of a layer that saves its inputs alone.

    Args:
        name: The name of the layer.
        module: The layer.
        forward: The layer's own forward.
        arguments: The arguments without their tensors.
        state: The state of the layer and of its arguments before the call.
        coding: How node tensors are quantized that wait for blocks while the layer's backward runs;
            None leaves them exact.
    """

    def __init__(
        self,
        name: str,
        module: nn.Module,
        forward: Callable[..., Any],
        arguments: Structure,
        state: Watch,
        coding: Coding | None,
    ) -> None:
        self._name, self._module, self._forward = name, module, forward
        self._arguments, self._state, self._coding = arguments, state, coding
        self._lock = threading.RLock()
        self._placeholders: list[weakref.ref[Placeholder]] = []
        self._results: dict[int, Saved] = {}
        self._encoded: list[Encoded] = []
        self._others: list[int] = []
        self._measured: dict[int, Saved] = {}

    def run(
        self,
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        tensors: Sequence[Tensor],
        session: Capture,
        named: dict[str, Tensor],
    ) -> Any:
        """Run the layer in forward.

        Args:
            args: The arguments by position: those of the caller, to whose lists a layer may add.
            kwargs: The arguments by name.
            tensors: The tensors among the arguments.
            session: The session that compresses them.
            named: Their names in the report; results of edge work are added.
        """
        self._run_state = RunState({t.device.type for t in tensors})
        self._requires_grad = [t.requires_grad for t in tensors]
        self._glimpses = [glimpse_of(tensor) for tensor in tensors]
        versions = [version_of(tensor) for tensor in tensors]
        self._changes = [False] * len(tensors)
        first = FirstRun(self._stand_for, session, named, tensors_held_by(self._module))
        self._inputs = [first.save(tensor) for tensor in tensors]
        self.advise: Advise | None = self._inputs[0].advise
        parts = (part for tensor in tensors for part in parts_of(tensor))
        first.most = _SHARE * sum(part.nbytes for part in parts if part.is_floating_point())
        self._ends = first.ends
        try:
            with counting(first), saved_tensors_hooks(first.pack, unpack):
                result = self._forward(*args, **kwargs)
            self._results = first.saved_results()
        finally:
            first.end()
        self._changes = [version_of(t) != v for t, v in zip(tensors, versions, strict=True)]
        return result

    def _stand_for(self, number: int, tensor: Tensor) -> Placeholder:
        """Return a placeholder for the tensor that the layer saves as number ``number``."""
        placeholder = Placeholder(self, number, tensor)
        self._placeholders.append(weakref.ref(placeholder))
        return placeholder

    def fill(self, placeholder: Placeholder) -> Saved:
        """Return the tensor of a placeholder; the layer runs again unless it did so already."""
        with self._lock:
            # Whoever reads the tensor reads the inputs: their codes are told of it.
            everything = *self._inputs, *self._results.values()
            encoded = [form for saved in everything for form in saved.all_encoded()]
            if len(encoded) != len(self._encoded):
                # At the first time, or after forward replaced a tensor that the model still holds.
                self._encoded = encoded
            pairs = zip(encoded, self._encoded, strict=True)
            # A measurement of noise decodes an input in another width, for one operation.
            others = [number for number, (now, usual) in enumerate(pairs) if now is not usual]
            if others:
                if others != self._others:
                    self._others, self._measured = others, {}
                if placeholder.number not in self._measured:
                    self._measured |= self._run_again([placeholder])
                return self._measured[placeholder.number]
            self._others, self._measured = [], {}
            if placeholder.filled is None:
                living = self._living()
                tensors = self._run_again(living)
                for each in living:
                    each.filled = tensors[each.number]
                if graph_task_id() != -1:
                    self._empty_after_backward()
            assert placeholder.filled is not None
            return placeholder.filled

    def _living(self) -> list[Placeholder]:
        """Return the placeholders of tensors that backward may still read."""
        return [p for reference in self._placeholders if (p := reference()) is not None]

    def _empty_after_backward(self) -> None:
        """Release the tensors when backward ends; a graph that is retained computes them anew."""
        reference = weakref.ref(self)

        def empty() -> None:
            recomputation = reference()
            for placeholder in recomputation._living() if recomputation is not None else ():
                placeholder.filled = None

        at_end_of_backward(empty)

    def _run_again(self, wanted: Sequence[Placeholder]) -> dict[int, Saved]:
        """Run the layer as in forward; return the tensors of placeholders, by their numbers."""
        self._check_state()
        # What a derivative inside forward returns, or one that is differentiated, is exact.
        coding = None if forward_runs() or torch.is_grad_enabled() else self._coding
        with torch.no_grad():
            tensors = [saved.tensor() for saved in self._inputs]
            results = {number: saved.tensor() for number, saved in self._results.items()}
        for glimpse, tensor in zip(self._glimpses, tensors, strict=True):
            if glimpse is not None:
                glimpse.check(
                    tensor,
                    "an input of a layer that is computed again in backward",
                    "a level that computes nothing again (level='L1', blocks=False)",
                )
        again = RunAgain({p.number: p.kind for p in wanted}, self._ends, results, Waiting(coding))
        token = torch.zeros((), device="cpu", requires_grad=True)
        with (
            self._run_state.restored(),
            _restored(self._state),
            counting(again),
            saved_tensors_hooks(again.pack, unpack),
        ):
            for number, requires_grad in enumerate(self._requires_grad):
                if requires_grad:
                    tensors[number] = _Input.apply(token, tensors[number], self._changes[number])
            args, kwargs = self._arguments.filled(tensors)
            del tensors
            try:
                self._forward(*args, **kwargs)
            except Enough:
                pass
            except RuntimeError:  # TorchScript turns Enough into one
                if not again.complete:
                    raise
        if not again.complete:
            raise RuntimeError(
                f"Expected {self._name} to save the same tensors when it runs again in backward as "
                "in forward (got others); wrap the model with a level that computes nothing again, "
                "such as level='L1', blocks=False"
            )
        return again.tensors

    def _check_state(self) -> None:
        name = self._state.lost_tensor()
        if name is not None:
            raise RuntimeError(
                "one of the variables needed for gradient computation has been modified by an "
                f"inplace operation: {name} of {self._name}, which is computed again in backward. "
                "Change it after backward, or take a level that computes nothing again "
                "(level='L1', blocks=False)."
            )


class _Input(torch.autograd.Function):
    """Makes an input the result of an operation, so that the layer may change it in place.

    ``_Input.apply(token, value, changes)`` returns ``value``, or a copy if the layer changes it:
    autograd lets no view that a function returns be changed. The token is any tensor that requires
    a gradient.
    """

    @staticmethod
    def forward(ctx: Any, token: Tensor, value: Tensor, changes: bool) -> Tensor:
        return value.clone() if changes else value.view_as(value)


@contextmanager
def _restored(state: Watch) -> Iterator[None]:
    """Restore the state of a layer inside, and its present state afterwards."""
    now = state.again()  # from the earlier state, code does not reach other objects
    try:
        state.undo()
        yield
    finally:
        now.undo()
