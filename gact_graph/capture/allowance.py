"""Saved tensors that are kept as they are, because a forward has saved little so far."""

from __future__ import annotations

from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from gact_graph.support.storage import key_of, place_of


class Allowance:
    """The first bytes that a forward saves: they are kept whole, for encoding takes time.

    Args:
        nbytes: How many bytes; 0 has everything encoded.
    """

    def __init__(self, nbytes: int) -> None:
        self._left = nbytes
        self._kept: dict[int, StorageWeakRef] = {}  # by their places

    def takes(self, tensor: Tensor) -> bool:
        """Whether the storage of the tensor is kept whole; if so, its bytes are used up."""
        if self._left <= 0 and not self._kept:
            return False
        place = place_of(tensor)
        if self._left > 0 and place not in self._kept:
            self._left -= tensor.untyped_storage().nbytes()
            if self._left > 0:
                self._kept[place] = key_of(tensor)
        return place in self._kept

    def would_take(self, tensor: Tensor) -> bool:
        """The same, but nothing is used up."""
        return place_of(tensor) in self._kept or self.covers(tensor.untyped_storage().nbytes())

    def covers(self, nbytes: int) -> bool:
        """Whether so many bytes more would be kept whole."""
        return nbytes < self._left

    def clear(self) -> None:
        """Forgets the storages."""
        self._kept.clear()
