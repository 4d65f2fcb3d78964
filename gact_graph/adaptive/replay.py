"""One forward, recorded so that it and its backward can run once more and leave no trace.

The gradient of the parameters depends on the arguments of forward, on the states of the model and
of the random generators when it starts, and on the gradient that reaches its outputs. All of these
are recorded, so the user need not supply a closure that runs a training step.
"""

from __future__ import annotations

import copy
import functools
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, Node, get_gradient_edge
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._pytree import tree_leaves, tree_map

from gact_graph.support.replica import CannotReplicate, Snapshot
from gact_graph.support.run_state import RunState
from gact_graph.support.storage import key_of, tensors_in, version_of

Receive = Callable[[int, Tensor], None]
Forward = Callable[[nn.Module], Callable[..., Any]]


class Runs(Protocol):
    """What runs a forward and sees its output: a session."""

    def run(self, forward: Callable[..., Any], args: Any, kwargs: Any) -> Any: ...


Capture = Callable[[nn.Module, Any], AbstractContextManager[Runs]]

_SHARDED = frozenset({"FSDPModule", "FullyShardedDataParallel"})


class CannotReplay(Exception):
    """A forward cannot run once more; the message says why."""


class Replayed:
    """A forward that has run once more.

    Args:
        parameters: The leaves of its graph for the parameters that learn.
        edges: The gradient edges of its outputs.
        gradients: The gradients that reached these outputs.
    """

    def __init__(
        self,
        parameters: Sequence[Tensor],
        edges: Sequence[GradientEdge],
        gradients: Sequence[Tensor],
    ) -> None:
        self.parameters = parameters
        self._edges = edges
        self._gradients = gradients

    @property
    def ends(self) -> list[Node]:
        """The nodes of the graph at its outputs."""
        return [edge.node for edge in self._edges]

    def backward(self, receive: Receive, keep_graph: bool = False) -> None:
        """Runs backward.

        Args:
            receive: Called with the index of a parameter (among those that learn) and its gradient,
                as soon as backward has that.
            keep_graph: Whether backward can run another time.
        """
        if not self.parameters:
            return
        with ExitStack() as stack:
            for index, parameter in enumerate(self.parameters):
                hand_over = functools.partial(_hand_over, receive, index)
                handle = parameter.register_post_accumulate_grad_hook(hand_over)
                stack.callback(handle.remove)
            torch.autograd.backward(
                self._edges, self._gradients, keep_graph, inputs=[*self.parameters]
            )


class Recording:
    """The arguments, states and output gradients of one forward.

    It is made before that forward. Containers among the arguments, and objects that hold tensors,
    are copied because forward may change them; the tensors themselves are not.

    Args:
        model: The model. The recording holds its state, but not the model.
        args: Positional arguments of forward.
        kwargs: Keyword arguments of forward.

    Raises:
        CannotReplay: The forward cannot run once more.
    """

    def __init__(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if any(isinstance(leaf, Iterator) for leaf in tree_leaves((args, kwargs))):
            raise CannotReplay("an iterator among its inputs gives its items only once")
        if any(_is_sharded(part) for part in model.modules()):
            raise CannotReplay("its parameters are sharded (FSDP)")
        # The graph of what comes before the model is freed by its backward, so it is cut off here.
        self._inputs = tree_map(_cut, (args, kwargs))
        if any(t.grad_fn is not None for t in tensors_in(self._inputs)):
            raise CannotReplay("objects among its inputs hold tensors of another module's graph")
        self._marks = _marks(self._inputs)
        self._signature = _signature(model)
        self._run_state = RunState({p.device.type for p in model.parameters()})
        self._gradients: dict[int, Tensor] = {}
        try:
            self._snapshot = Snapshot(model, lenient=True)
        except CannotReplicate as reason:
            raise CannotReplay(f"the model {reason}") from reason

    def watch(self, output: Any) -> None:
        """Called when forward has ended: waits for the gradients of its outputs.

        Raises:
            CannotReplay: The forward changed an object that cannot be restored.
        """
        changed = self._snapshot.look_for_changes()
        if changed is not None:
            raise CannotReplay(f"it changes the object in the model's attribute {changed}")
        # A strong reference would close a cycle: graph, hook, recording, argument.
        noted = weakref.ref(self)
        for index, tensor in enumerate(tensors_in(output)):
            if tensor.grad_fn is not None:
                tensor.register_hook(functools.partial(_note, noted, index))

    @property
    def ready(self) -> bool:
        """Whether a gradient has reached an output."""
        return bool(self._gradients)

    def is_of(self, model: nn.Module) -> bool:
        """Whether the same parameters learn, in the same dtypes and on the same devices."""
        return _signature(model) == self._signature

    @property
    def unchanged(self) -> bool:
        """Whether no argument was changed or freed since."""
        return _marks(self._inputs) == self._marks

    @property
    def learning(self) -> list[Tensor]:
        """The parameters that learn, in the order of their indices."""
        return self._snapshot.learning

    @contextmanager
    def rerun(
        self, forward: Forward, capture: Capture, values: Sequence[Tensor] | None = None
    ) -> Iterator[Replayed]:
        """Runs forward once more, on a replica of the model.

        Parameters, buffers, ``grad``, attributes and random states stay as they are. A model of
        several ranks (DistributedDataParallel) runs without the other ranks.

        Args:
            forward: Gives the function to run, from the replica.
            capture: Gives the context in which it runs, from the replica and the arguments.
            values: Values for the parameters that learn; by default those they have.
        """
        with ExitStack() as stack:
            replica = stack.enter_context(self._snapshot.replica(values, aliases=True))
            stack.enter_context(self._run_state.restored())
            args, kwargs = inputs = tree_map(_copy, self._inputs)
            with capture(replica.module, inputs) as session:
                output = session.run(forward(replica.module), args, kwargs)
            del args, kwargs, inputs
            outputs = [*tensors_in(output)]
            edges = [get_gradient_edge(outputs[index]) for index in self._gradients]
            del output, outputs  # backward does not need their values
            yield Replayed(replica.parameters, edges, [*self._gradients.values()])

    def note(self, index: int, gradient: Tensor) -> None:
        """Adds a gradient that reached an output."""
        known = self._gradients.get(index)
        gradient = gradient.detach()
        self._gradients[index] = gradient if known is None else known + gradient


def _marks(inputs: Any) -> list[tuple[StorageWeakRef, int | None]]:
    """Identifies the tensors among the inputs, with their versions."""
    return [(key_of(t), version_of(t)) for t in tensors_in(inputs)]


def _cut(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value if value.grad_fn is None else value.detach().requires_grad_()
    return _copy(value)


def _copy(value: Any) -> Any:
    """A shallow copy of an object that holds tensors (PyG's ``Data``, a dataclass)."""
    if isinstance(value, Tensor | nn.Module) or next(tensors_in(value), None) is None:
        return value
    try:
        return copy.copy(value)
    except Exception:  # a class may refuse to be copied
        return value


def _is_sharded(module: nn.Module) -> bool:
    return any(kind.__name__ in _SHARDED for kind in type(module).__mro__)


def _signature(model: nn.Module) -> list[Any]:
    return [(p.requires_grad, p.dtype, p.device) for p in model.parameters()]


def _hand_over(receive: Receive, index: int, parameter: Tensor) -> None:
    if parameter.grad is None:  # the forward did not use this parameter
        return
    receive(index, parameter.grad)
    parameter.grad = None  # all gradients at once would take the memory of the model


def _note(recording: weakref.ref[Recording], index: int, gradient: Tensor) -> None:
    found = recording()
    if found is not None:
        found.note(index, gradient)
