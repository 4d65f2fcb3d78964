"""Forwards that save too little to be compressed: their saved tensors are only counted."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

from gact_graph.codecs import Context, Kept, Saved
from gact_graph.support.storage import key_of, parts_of, plain_of, tensors_held_by, tensors_in


class Counted:
    """Keeps the tensors that one forward saves by reference, and counts their bytes.

    Operations are not traced, which would take longer than a small forward itself.

    Args:
        inputs: The arguments of forward, nested; they are not counted.
    """

    def __init__(self, inputs: Any) -> None:
        self._inputs = {key_of(t) for t in tensors_in(inputs)}
        self._saved: dict[StorageWeakRef, int] = {}

    def pack(self, tensor: Tensor) -> Saved:
        """Return a reference to the tensor, and count it: the pack hook.

        The unpack hook is :func:`gact_graph.support.current.unpack`.
        """
        tensor = plain_of(tensor)
        if not isinstance(tensor, nn.Parameter):
            for part in parts_of(tensor):
                key = key_of(part)
                if key not in self._saved and key not in self._inputs:
                    self._saved[key] = part.untyped_storage().nbytes()
        return Saved(Context(Kept(tensor, "an uncompressed forward")))

    def raw_bytes(self, model: nn.Module, enough: int) -> int:
        """Return the bytes of the unique storages that were saved.

        Args:
            model: The model. Its parameters under any view, buffers and caches are not counted.
            enough: Below this number the count may include tensors of the model, since finding them
                takes time.
        """
        if sum(self._saved.values()) >= enough:
            for owned in tensors_held_by(model):
                for part in parts_of(owned):
                    self._saved.pop(key_of(part), None)
        return sum(self._saved.values())
