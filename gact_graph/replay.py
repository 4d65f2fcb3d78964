"""One forward, recorded so that it and its backward can be run again without a trace.

Given the arguments of forward, the random state at its start and the gradient that reached its
outputs, the gradient of the parameters depends on nothing else; so no closure of the user's is
needed.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge
from torch.utils._pytree import tree_map_only

from gact_graph.storage import tensors_in, version_of

Receive = Callable[[int, Tensor], None]


class Recording:
    """The arguments, random state and output gradients of one forward."""

    def __init__(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        # A graph before the model is gone after its backward: it is cut off here.
        self._args, self._kwargs = tree_map_only(Tensor, _cut, (args, kwargs))
        self._versions = [version_of(t) for t in tensors_in((args, kwargs))]
        self._random = _random_state()
        self._autocast = {
            kind: (torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind))
            for kind in {"cpu", *(p.device.type for p in model.parameters())}
        }
        self._gradients: dict[int, Tensor] = {}

    @property
    def possible(self) -> bool:
        """Whether the arguments hold no graph of their own, as an object's tensors may."""
        return all(t.grad_fn is None for t in tensors_in((self._args, self._kwargs)))

    def watch(self, output: Any) -> None:
        """Waits for the gradients of the outputs."""
        # A strong reference would close a cycle: graph, hook, recording, argument.
        noted = weakref.ref(self)
        for place, tensor in enumerate(tensors_in(output)):
            if tensor.grad_fn is not None:
                tensor.register_hook(functools.partial(_note, noted, place))

    @property
    def ready(self) -> bool:
        """Whether backward has been here."""
        return bool(self._gradients)

    @property
    def unchanged(self) -> bool:
        """Whether the arguments are still what they were."""
        now = [version_of(t) for t in tensors_in((self._args, self._kwargs))]
        return now == self._versions

    def replay(
        self,
        model: nn.Module,
        forward: Callable[..., Any],
        capture: Callable[[Any], AbstractContextManager[Any]],
        receive: Receive,
    ) -> None:
        """Runs forward and backward once more.

        Args:
            model: The model; its parameters, buffers, ``grad`` and the random state stay as they
                are.
            forward: What to run.
            capture: Gives the context in which forward runs, from its arguments.
            receive: Gets each gradient as soon as backward has it, with the place of its parameter
                among those that learn.
        """
        with ExitStack() as stack:
            parameters = stack.enter_context(_stand_ins(model))
            stack.enter_context(_random_state_of(self._random))
            stack.enter_context(torch.enable_grad())
            for kind, (enabled, dtype) in self._autocast.items():
                stack.enter_context(torch.autocast(kind, dtype, enabled))
            for place, parameter in enumerate(parameters):
                hand_over = functools.partial(_hand_over, receive, place)
                parameter.register_post_accumulate_grad_hook(hand_over)
            with capture((self._args, self._kwargs)):
                output = forward(*self._args, **self._kwargs)
            outputs = [*tensors_in(output)]
            edges = [get_gradient_edge(outputs[place]) for place in self._gradients]
            del output, outputs  # backward can do without what is in them
            if parameters:
                torch.autograd.backward(edges, [*self._gradients.values()], inputs=parameters)

    def note(self, place: int, gradient: Tensor) -> None:
        """Adds a gradient that reached an output."""
        known = self._gradients.get(place)
        gradient = gradient.detach()
        self._gradients[place] = gradient if known is None else known + gradient


def _cut(tensor: Tensor) -> Tensor:
    return tensor if tensor.grad_fn is None else tensor.detach().requires_grad_()


def _hand_over(receive: Receive, place: int, parameter: Tensor) -> None:
    assert parameter.grad is not None  # it was just accumulated
    receive(place, parameter.grad)
    parameter.grad = None  # all of them at once would be a second copy of the model


def _note(recording: weakref.ref[Recording], place: int, gradient: Tensor) -> None:
    found = recording()
    if found is not None:
        found.note(place, gradient)


@contextmanager
def _stand_ins(model: nn.Module) -> Iterator[list[Tensor]]:
    """Puts others in place of parameters and buffers: so hooks on them, and statistics, rest.

    The stand-ins of parameters share their memory; those of buffers have their own.
    """
    made: dict[int, Tensor] = {}
    leaves: list[Tensor] = []
    before = [(m, dict(m._parameters), dict(m._buffers)) for m in model.modules()]
    try:
        for module, parameters, buffers in before:
            for name, parameter in parameters.items():
                if parameter is not None:
                    if id(parameter) not in made:
                        alias = nn.Parameter(parameter.detach(), parameter.requires_grad)
                        made[id(parameter)] = alias
                        leaves += [alias] if parameter.requires_grad else []
                    module._parameters[name] = made[id(parameter)]  # type: ignore[assignment]
            for name, buffer in buffers.items():
                if buffer is not None:
                    module._buffers[name] = made.setdefault(id(buffer), buffer.clone())
        yield leaves
    finally:
        for module, parameters, buffers in before:
            module._parameters.update(parameters)
            module._buffers.update(buffers)


def _random_state() -> tuple[Tensor, list[Tensor]]:
    cuda = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else []
    return torch.get_rng_state(), cuda


@contextmanager
def _random_state_of(state: tuple[Tensor, list[Tensor]]) -> Iterator[None]:
    now = _random_state()
    _set_random_state(state)
    try:
        yield
    finally:
        _set_random_state(now)


def _set_random_state(state: tuple[Tensor, list[Tensor]]) -> None:
    cpu, cuda = state
    torch.set_rng_state(cpu)
    if cuda:
        torch.cuda.set_rng_state_all(cuda)
