"""Tensors that are kept by reference: those of the model and its caller, and the first bytes."""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import Any

from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

from gact_graph.support.exact import needs_a_gradient
from gact_graph.support.storage import key_of, parts_of, storage_id, tensors_held_by, tensors_in


class ExternallyOwned:
    """The storages of a model's parameters, buffers and caches, and of the inputs of its forward.

    A reference to them takes no memory.

    Args:
        model: The model.
        inputs: The arguments of forward, nested.
    """

    def __init__(self, model: nn.Module, inputs: Any) -> None:
        self._keys: dict[int, StorageWeakRef] = {}  # by storage_id
        self._of_model: dict[int, bool] = {}  # whether they are parameters, by storage_id
        self._inputs: list[weakref.ref[Tensor]] = []
        for tensor in tensors_held_by(model):
            for part in parts_of(tensor):
                self._add(part)
                self._of_model[storage_id(part)] = isinstance(tensor, nn.Parameter)
        self.add(tensors_in(inputs))

    def __contains__(self, tensor: Tensor) -> bool:
        return storage_id(tensor) in self._keys or _is_parameter(tensor)

    def is_state(self, tensor: Tensor) -> bool:
        """Return whether a tensor is a buffer or a cache, which the model may update in place."""
        return self._of_model.get(storage_id(tensor)) is False

    def is_input(self, tensor: Tensor) -> bool:
        """Return whether a tensor belongs to the caller alone."""
        key = storage_id(tensor)
        return key in self._keys and key not in self._of_model

    def add(self, inputs: Iterable[Tensor]) -> None:
        """Add inputs."""
        for tensor in inputs:
            self._add(tensor)
            if tensor.is_floating_point():
                self._inputs.append(weakref.ref(tensor))

    def _add(self, tensor: Tensor) -> None:
        key = key_of(tensor)
        self._keys[key.cdata] = key

    def clear(self) -> None:
        """Release the storages."""
        self._keys.clear()
        self._of_model.clear()

    @property
    def input_requires_grad(self) -> bool:
        """Whether the gradient of an input is requested, for forces or for a penalty on it.

        Such a gradient is often differentiated again.
        """
        return any(needs_a_gradient(reference()) for reference in self._inputs)


def _is_parameter(tensor: Tensor) -> bool:
    """Return whether a tensor is a parameter or a view of one.

    ``fully_shard`` makes the parameters of a layer whole while it runs, in memory of its own.
    """
    return isinstance(tensor if tensor._base is None else tensor._base, nn.Parameter)


def owned_storages(model: nn.Module, inputs: Any) -> dict[int, Tensor]:
    """Return a tensor of each storage that model and inputs own now, by :func:`storage_id`."""
    owned = {storage_id(p): p for t in tensors_held_by(model) for p in parts_of(t)}
    return owned | storages_in(inputs)


def storages_in(value: Any) -> dict[int, Tensor]:
    """Return a tensor of each storage in nested values, by :func:`storage_id`."""
    return {storage_id(t): t for t in tensors_in(value)}


class Allowance:
    """The first bytes that a forward saves: they are kept by reference, since encoding takes time.

    Args:
        nbytes: The number of bytes; 0 to encode everything.
    """

    def __init__(self, nbytes: int) -> None:
        self._left = nbytes
        self._kept: dict[int, StorageWeakRef] = {}  # by storage_id

    def takes(self, tensor: Tensor) -> bool:
        """Return whether the tensor's storage is kept; if so, its bytes are deducted."""
        if self._left <= 0 and not self._kept:
            return False
        key = storage_id(tensor)
        if self._left > 0 and key not in self._kept:
            self._left -= tensor.untyped_storage().nbytes()
            if self._left > 0:
                self._kept[key] = key_of(tensor)
        return key in self._kept

    def would_take(self, tensor: Tensor) -> bool:
        """Return whether :meth:`takes` would keep the tensor's storage."""
        return storage_id(tensor) in self._kept or self.covers(tensor.untyped_storage().nbytes())

    def covers(self, nbytes: int) -> bool:
        """Return whether this number of further bytes would be kept."""
        return nbytes < self._left

    def clear(self) -> None:
        """Release the storages."""
        self._kept.clear()
