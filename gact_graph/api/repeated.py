"""Whether calls repeat with the same inputs, as in training on one whole graph."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import Tensor

from gact_graph.support.storage import key_of, tensors_in, version_of


class RepeatedInputs:
    """Compare the inputs of a call with those of the call before.

    Tensors are the same if they are the same memory, unchanged. Tensors that require a gradient,
    such as embeddings, follow from parameters: for them, equal shapes are enough.

    Attributes:
        repeated: Whether the inputs were the same in the last call; True before the second call.
    """

    def __init__(self) -> None:
        self.repeated: bool = True
        self._last: list[Any] | None = None

    def see(self, inputs: Any) -> bool:
        """Compare the inputs of the next call, nested; None for unknown inputs.

        Returns:
            :attr:`repeated`.
        """
        keys = None if inputs is None else [*_keys_of(inputs)]
        if keys is None or self._last is not None:
            self.repeated = keys is not None and keys == self._last
        self._last = keys
        return self.repeated

    def __getstate__(self) -> dict[str, Any]:
        # References to storages are those of one process.
        return {"repeated": self.repeated, "_last": None}


def _keys_of(inputs: Any) -> Iterator[tuple[Any, ...]]:
    for tensor in tensors_in(inputs):
        yield (
            tensor.shape,
            None if tensor.requires_grad else _memory_of(tensor),
        )


def _memory_of(tensor: Tensor) -> tuple[Any, ...]:
    return key_of(tensor), tensor.storage_offset(), tensor.stride(), version_of(tensor)
