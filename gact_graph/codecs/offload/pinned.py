"""Pinned host memory, used again and again: to pin it takes milliseconds and stops the device."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

# Tensors start in a buffer at multiples of this many bytes: views of any dtype can.
_ALIGNMENT = 64


class Buffer:
    """Pinned memory [nbytes] uint8.

    ``last`` is the event of the last copy from or to it, None before the first. Whoever copies next
    lets their stream wait for it: so a buffer changes hands while a copy is still under way.
    """

    def __init__(self, memory: Tensor) -> None:
        self.memory = memory
        self.last: Any = None

    @property
    def nbytes(self) -> int:
        return self.memory.nbytes

    def like(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Views of the memory, one after the other, with the shapes and dtypes of ``tensors``."""
        views, start = [], 0
        for tensor in tensors:
            part = self.memory[start : start + tensor.nbytes]
            views.append(part.view(tensor.dtype).view(tensor.shape))
            start += room_for([tensor])
        return views


class Pool:
    """Buffers by size, a power of two as in torch's own allocator of pinned memory.

    In use and free ones together never hold more bytes than were in use at once: one step's worth.
    What is beyond, because sizes change, goes back to torch, the longest unused first; torch keeps
    it for whatever is pinned next, until ``torch.accelerator.memory.empty_host_cache()``.

    Args:
        make: Pins that many bytes.
    """

    def __init__(self, make: Callable[[int], Tensor]) -> None:
        self._make = make
        self._lock = threading.Lock()
        self._returned: deque[Buffer] = deque()
        self._free: list[Buffer] = []
        self._free_bytes = 0
        self._used_bytes = 0
        self._most_bytes = 0

    @property
    def nbytes(self) -> int:
        """Bytes of all buffers, in use or free."""
        with self._lock:
            return self._used_bytes + self._free_bytes

    def take(self, nbytes: int) -> Buffer:
        """A buffer of ``nbytes`` (1 or more) or up to twice that."""
        size = 1 << (nbytes - 1).bit_length()
        with self._lock:
            self._sort_in()
            found = next((i for i, b in enumerate(self._free) if b.nbytes == size), None)
            if found is None:
                buffer = Buffer(self._make(size))
            else:
                buffer = self._free.pop(found)
                self._free_bytes -= size
            self._used_bytes += size
            self._most_bytes = max(self._most_bytes, self._used_bytes)
            while self._used_bytes + self._free_bytes > self._most_bytes:
                self._free_bytes -= self._free.pop(0).nbytes
        return buffer

    def give(self, buffer: Buffer) -> None:
        """Takes a buffer back.

        The garbage collector calls this, on any thread and also while that thread holds the lock:
        so it takes none.
        """
        self._returned.append(buffer)

    def _sort_in(self) -> None:
        while self._returned:
            buffer = self._returned.popleft()
            self._used_bytes -= buffer.nbytes
            self._free_bytes += buffer.nbytes
            self._free.append(buffer)


def room_for(tensors: Sequence[Tensor]) -> int:
    """The bytes that a buffer needs for these tensors."""
    return sum(-(-tensor.nbytes // _ALIGNMENT) * _ALIGNMENT for tensor in tensors)
