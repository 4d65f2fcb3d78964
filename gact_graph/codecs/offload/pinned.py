"""Reused pinned host memory: pinning takes milliseconds and stops the device."""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

# The alignment of tensors in a buffer, in bytes, which suits views of any dtype.
_ALIGNMENT = 64


class Buffer:
    """Pinned memory [nbytes] uint8.

    ``last`` is the event of the last copy from or to it, None before the first. The stream of the
    next copy waits for it, so a buffer is reused while a copy is still in progress.
    """

    def __init__(self, memory: Tensor) -> None:
        self.memory = memory
        self.last: Any = None
        self.process = os.getpid()

    @property
    def nbytes(self) -> int:
        return self.memory.nbytes

    def like(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Return consecutive views of the memory with the shapes and dtypes of ``tensors``."""
        views, start = [], 0
        for tensor in tensors:
            part = self.memory[start : start + tensor.nbytes]
            views.append(part.view(tensor.dtype).view(tensor.shape))
            start += room_for([tensor])
        return views


class Pool:
    """A pool of buffers whose sizes are powers of two, as in torch's allocator of pinned memory.

    Used and free buffers together never exceed the most bytes that were ever in use at once. Excess
    buffers, which remain when sizes change, return to torch, the least recently used first; torch
    keeps them until ``torch.accelerator.memory.empty_host_cache()``.

    A forked process uses none of its parent's buffers again: both would write to the same file.

    Args:
        make: A function that pins a number of bytes.
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
        """The bytes of all buffers, used or free."""
        with self._lock:
            return self._used_bytes + self._free_bytes

    def take(self, nbytes: int) -> Buffer:
        """Return a buffer of at least ``nbytes`` (1 or more) and less than twice that."""
        size = 1 << (nbytes - 1).bit_length()
        with self._lock:
            self._sort_in()
            self._free = [buffer for buffer in self._free if buffer.process == os.getpid()]
            self._free_bytes = sum(buffer.nbytes for buffer in self._free)
            place = next((i for i, b in enumerate(self._free) if b.nbytes == size), None)
            if place is None:
                buffer = Buffer(self._make(size))
            else:
                buffer = self._free.pop(place)
                self._free_bytes -= size
            self._used_bytes += size
            self._most_bytes = max(self._most_bytes, self._used_bytes)
            while self._used_bytes + self._free_bytes > self._most_bytes:
                self._free_bytes -= self._free.pop(0).nbytes
        return buffer

    def give(self, buffer: Buffer) -> None:
        """Return a buffer to the pool.

        The garbage collector may call this on a thread that holds the lock, so it takes no lock.
        """
        self._returned.append(buffer)

    def _sort_in(self) -> None:
        while self._returned:
            buffer = self._returned.popleft()
            self._used_bytes -= buffer.nbytes
            self._free_bytes += buffer.nbytes
            self._free.append(buffer)


def room_for(tensors: Sequence[Tensor]) -> int:
    """Return the bytes of a buffer for these tensors."""
    return sum(-(-tensor.nbytes // _ALIGNMENT) * _ALIGNMENT for tensor in tensors)
