"""The policy for freed tensors on a CPU: when their memory is kept, and when it goes back.

PyTorch returns a large freed tensor to the system and fetches the pages of the next one anew, which
takes a third to a half of a training step. From the first step of a wrapped model on, tensors of
64 KiB or more take the memory of earlier ones (``csrc/cpu/kept_memory.cpp``). Kept and used memory
together never exceed the memory that was used at some moment of this step or of the last, so the
process peaks no higher. On CUDA, PyTorch's own allocator does the same.

All of it goes back when the last wrapped model dies, when a model is unwrapped, and when no wrapped
model has begun a step for a while. No memory is kept where the process has a limit on its
addresses, or where another allocator serves it, which keeps memory itself. The environment variable
``GACT_GRAPH_KEEP_MEMORY`` overrules the last.

Smaller tensors, and all where no memory is kept, stay with the C library, whose heap is trimmed
while a model trains and limited while a budget holds.
"""

from __future__ import annotations

import os
import sys
import time
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from gact_graph.support.memory import heap

SWITCH = "GACT_GRAPH_KEEP_MEMORY"
"""The environment variable: 1 keeps memory, 0 never does; unset, the allocator decides."""

IDLE_SECONDS = 10.0
"""Kept memory goes back if no step begins for so long and twice the time between the last two."""

_LEAST_RETURNED, _MOST_RETURNED = 1 << 15, 4 << 20
"""The limits within which a budget sets the size from which freed tensors go back at once. Tensors
that go back are rounded up to whole pages: eight of them are where that stops to show."""

_SHARE_RETURNED = 1024
"""The part of a budget from which on freed tensors go back. Some dozen smaller ones may stay with
the process, which is a few per cent of the budget."""

_TRIM_EVERY, _TRIM_FROM = 64 << 20, 256 << 20
"""The bytes of coded tensors between two looks at the heap, and the free bytes that are trimmed.
Layers that run in blocks have less free between two blocks, and would fetch it again at once."""


class MemoryPolicy:
    """Decides what becomes of freed tensors on a CPU. There is one for the process.

    Small objects that live until backward settle in the gaps of freed tensors, which then serve no
    other tensor. So the heap is trimmed while tensors are encoded and decoded, where much is free.
    """

    def __init__(self) -> None:
        self._library: Any = None  # None before the operators are loaded: nothing can be kept
        self._owners: set[weakref.ref[Any]] = set()
        self._last_step = float("inf")
        self._coded_bytes = 0

    def use(self, library: Any) -> None:
        """Keep memory with these compiled operators, which a training step has loaded."""
        self._library = library
        self._keep()

    def start_step(self, owner: object) -> None:
        """Keep memory from now on while ``owner`` lives, a model whose training step begins.

        Raises:
            ValueError: The environment variable is neither 0 nor 1.
        """
        self._owners.add(weakref.ref(owner, self._forget))
        self._keep()

    def end(self) -> None:
        """Return kept memory to the system, and keep none until the next step."""
        if self._library is not None:
            self._library.end_keeping()

    def give_back(self, device: torch.device) -> None:
        """Return all freed memory to the system, if ``device`` is the CPU."""
        if device.type == "cpu":
            self.end()
            heap.trim()

    def coded(self, tensor: torch.Tensor) -> None:
        """Trim the heap now and then; ``tensor`` is about to be encoded, or was decoded."""
        if tensor.device.type != "cpu" or tensor.layout != torch.strided:
            return  # a COO matrix has no nbytes
        self._coded_bytes += tensor.nbytes
        if self._coded_bytes > _TRIM_EVERY:
            self._coded_bytes = 0
            if heap.free_bytes() > _TRIM_FROM:
                heap.trim()

    def limit(self, budget: int) -> None:
        """Return freed tensors to the system at once, so far as a budget in bytes asks for it."""
        least = min(max(budget // _SHARE_RETURNED, _LEAST_RETURNED), _MOST_RETURNED)
        heap.return_from(least)
        heap.close_gaps(least)

    @contextmanager
    def limited(self) -> Iterator[None]:
        """Inside, return freed tensors to the system at once."""
        self.limit(0)
        try:
            yield
        finally:
            heap.return_from(heap.LARGEST_LIMIT)

    def why_not(self) -> str | None:
        """Return why no memory is kept in this process; None where it is.

        Raises:
            ValueError: The environment variable is neither 0 nor 1.
        """
        asked = os.environ.get(SWITCH, "")
        if asked not in ("", "0", "1"):
            raise ValueError(
                f"Expected the environment variable {SWITCH} to be 0 or 1 (got {asked!r}); unset "
                "it to keep memory where no other allocator serves the process"
            )
        if asked == "0":
            return f"{SWITCH}=0"
        if sys.platform != "linux":
            return "needs Linux"
        if _has_limit():
            return "the process has a limit on its address space (ulimit -v or -d)"
        other = heap.allocator()
        if other is not None and asked != "1":
            return f"{other} serves memory; {SWITCH}=1 keeps it all the same"
        return None

    def _keep(self) -> None:
        if self._library is None:
            return
        if self.why_not() is not None:
            self._library.end_keeping()
            return
        now = time.monotonic()
        self._library.start_keeping(IDLE_SECONDS + 2 * max(0.0, now - self._last_step))
        self._last_step = now

    def _forget(self, owner: weakref.ref[Any]) -> None:
        self._owners.discard(owner)
        if not self._owners:
            self.end()


def _has_limit() -> bool:
    import resource  # not on every system

    limits = (resource.RLIMIT_AS, resource.RLIMIT_DATA)
    return any(resource.getrlimit(limit)[0] != resource.RLIM_INFINITY for limit in limits)


memory_policy = MemoryPolicy()
