"""One forward, recorded so that it and its backward can be run again without a trace.

Given the arguments of forward, the random state at its start and the gradient that reached its
outputs, the gradient of the parameters depends on nothing else; so no closure of the user's is
needed.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge
from torch.utils._pytree import tree_map_only

from gact_graph.stand_ins import stand_ins
from gact_graph.storage import tensors_in, version_of
from gact_graph.surroundings import Surroundings

Receive = Callable[[int, Tensor], None]


class Recording:
    """The arguments, random state and output gradients of one forward."""

    def __init__(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        # A graph before the model is gone after its backward: it is cut off here.
        self._args, self._kwargs = tree_map_only(Tensor, _cut, (args, kwargs))
        self._versions = [version_of(t) for t in tensors_in((args, kwargs))]
        self._surroundings = Surroundings({p.device.type for p in model.parameters()})
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
            parameters = stack.enter_context(stand_ins(model))
            stack.enter_context(self._surroundings.again())
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
