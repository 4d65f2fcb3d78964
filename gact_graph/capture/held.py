"""Tensors that the model and its caller hold anyway: keeping them by reference costs nothing."""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import Any

from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

from gact_graph.support.exact import needs_a_gradient
from gact_graph.support.storage import key_of, parts_of, place_of, tensors_held_by, tensors_in


class ExternallyOwned:
    """The storages of a model's parameters, buffers and caches, and of the inputs of its forward.

    Args:
        model: The model.
        inputs: The arguments of forward, nested as they come.
    """

    def __init__(self, model: nn.Module, inputs: Any) -> None:
        self._keys: dict[int, StorageWeakRef] = {}  # by their places
        self._inputs: list[weakref.ref[Tensor]] = []
        for tensor in tensors_held_by(model):
            for part in parts_of(tensor):
                self._add(part)
        self.add(tensors_in(inputs))

    def __contains__(self, tensor: Tensor) -> bool:
        return place_of(tensor) in self._keys

    def add(self, inputs: Iterable[Tensor]) -> None:
        """Counts more tensors among the inputs."""
        for tensor in inputs:
            self._add(tensor)
            if tensor.is_floating_point():
                self._inputs.append(weakref.ref(tensor))

    def _add(self, tensor: Tensor) -> None:
        key = key_of(tensor)
        self._keys[key.cdata] = key

    def clear(self) -> None:
        """Forgets the storages."""
        self._keys.clear()

    @property
    def an_input_needs_a_gradient(self) -> bool:
        """Whether an input is there for its gradient: for forces, or for a penalty on it.

        Such a gradient is often differentiated once more.
        """
        inputs = (reference() for reference in self._inputs)
        return any(needs_a_gradient(t) for t in inputs)


def storages_held_by(model: nn.Module, inputs: Any) -> dict[int, Tensor]:
    """A tensor of each storage that the model and the inputs hold now, by its place."""
    held = {place_of(p): p for t in tensors_held_by(model) for p in parts_of(t)}
    return held | storages_in(inputs)


def storages_in(value: Any) -> dict[int, Tensor]:
    """A tensor of each storage inside nested tuples, lists, dicts and objects, by its place."""
    return {place_of(t): t for t in tensors_in(value)}
