"""Forwards that are not compressed, because they save little: their bytes are only counted."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

from gact_graph.codecs import Context, Kept, Saved
from gact_graph.support.storage import (
    is_plain,
    key_of,
    parts_of,
    plain_of,
    tensors_held_by,
    tensors_in,
)


class Counted:
    """Keeps what one forward saves by reference, and counts its bytes.

    No trace follows the operations: that takes longer than a small forward itself.

    Args:
        inputs: The arguments of forward, nested as they come; not counted.
    """

    def __init__(self, inputs: Any) -> None:
        self._inputs = {key_of(t) for t in tensors_in(inputs)}
        self._saved: dict[StorageWeakRef, int] = {}

    def pack(self, tensor: Tensor) -> Saved:
        """The pack hook; :func:`gact_graph.support.current.unpack` is the other one."""
        tensor = plain_of(tensor)
        if not isinstance(tensor, nn.Parameter):
            for part in (tensor,) if is_plain(tensor) else parts_of(tensor):
                key = key_of(part)
                if key not in self._saved and key not in self._inputs:
                    self._saved[key] = part.untyped_storage().nbytes()
        return Saved(Context(Kept(tensor, "a forward that is left alone")))

    def raw_bytes(self, model: nn.Module, enough: int) -> int:
        """Bytes of the unique storages that were saved.

        Args:
            model: What it holds (parameters under any view, buffers, caches) is not counted.
            enough: Below so many bytes the count may include what the model holds: finding that
                takes time.
        """
        if sum(self._saved.values()) >= enough:
            for held in tensors_held_by(model):
                for part in parts_of(held):
                    self._saved.pop(key_of(part), None)
        return sum(self._saved.values())
