"""The policy for freed tensors on a CPU: which memory is kept, and when it returns to the system.

PyTorch returns the memory of large freed tensors to the system, and new pages for the next tensors
take a third to a half of a training step. So from the first step of a wrapped model on, tensors of
64 KiB or more reuse the memory of earlier tensors (``csrc/allocator/kept_memory.cpp``). Kept and
used memory together never exceed the most memory that this step or the last one used, so the peak
of the process does not rise. CUDA tensors are left to PyTorch's caching allocator.

All kept memory is returned when the last wrapped model dies, when a model is unwrapped, and when no
wrapped model has started a step for some seconds. Nothing is kept if the process has a limit on its
address space, or if another allocator replaces malloc; ``GACT_GRAPH_KEEP_MEMORY`` overrides the
latter.

Smaller tensors, or all tensors if nothing is kept, live in the heap of the C library. It is trimmed
in training, and bounded under a memory budget.
"""

from __future__ import annotations

import os
import sys
import time
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Final

import torch

from gact_graph.support.memory import heap
from gact_graph.support.memory.limits import has_limit

SWITCH = "GACT_GRAPH_KEEP_MEMORY"
"""The environment variable: 1 keeps memory, 0 keeps none; by default the allocator decides."""

IDLE_SECONDS = 10.0
"""Kept memory is returned if no step starts for so long plus twice the last time between steps."""

_LEAST_RETURNED, _MOST_RETURNED = 1 << 15, 4 << 20
"""Bounds of the size from which a limit returns freed tensors immediately. Returned tensors occupy
whole pages: from eight pages on the rounding is negligible."""

_SHARE_RETURNED = 1024
"""The share of a planned peak that this size is: some dozens of smaller tensors may remain with the
process, a few per cent of the peak."""

_TRIM_EVERY, _TRIM_FROM = 64 << 20, 64 << 20
"""Bytes of encoded and decoded tensors between two checks of the heap, and the free bytes from
which it is trimmed. Layers in blocks free less between two blocks, and reuse it immediately."""


class MemoryPolicy:
    """Keep, trim and bound the memory of freed tensors on a CPU; one policy serves the process.

    Small objects that live until backward occupy gaps of freed tensors, which then fit no other
    tensor. So the heap is trimmed while tensors are encoded and decoded, if much of it is free.
    """

    def __init__(self) -> None:
        self._library: Any = None  # nothing is kept before the operators are loaded
        self._owners: set[weakref.ref[Any]] = set()
        self._last_step = float("inf")
        self._coded_bytes = 0
        self._limits: dict[weakref.ref[Any], int] = {}  # sizes from which freed tensors return

    def use(self, library: Any) -> None:
        """Keep memory by ``library``, the compiled operators, once they are loaded."""
        self._library = library
        self._keep()

    def start_step(self, owner: object) -> None:
        """Keep memory until ``owner``, a model that starts a training step, dies.

        Raises:
            ValueError: If the environment variable is neither 0 nor 1.
        """
        self._owners.add(weakref.ref(owner, self._forget))
        self._keep()

    def end(self) -> None:
        """Return kept memory to the system, and keep nothing until the next step."""
        if self._library is not None:
            self._library.end_keeping()

    def release(self, device: torch.device) -> None:
        """Return all freed memory to the system if ``device`` is the CPU."""
        if device.type == "cpu":
            self.end()
            heap.trim()

    def coded(self, tensor: torch.Tensor) -> None:
        """Count an encoded or decoded tensor; trim the heap at intervals."""
        if tensor.device.type != "cpu" or tensor.layout != torch.strided:
            return  # sparse COO tensors have no nbytes
        self._coded_bytes += tensor.nbytes
        if self._coded_bytes > _TRIM_EVERY:
            self._coded_bytes = 0
            if heap.free_bytes() > _TRIM_FROM:
                heap.trim()

    def limit(self, peak: int, owner: object) -> None:
        """Return freed tensors that matter for a peak in bytes at once, until ``owner`` dies."""
        least = min(max(peak // _SHARE_RETURNED, _LEAST_RETURNED), _MOST_RETURNED)
        self._limits[weakref.ref(owner, self._lift)] = least
        self._apply_limits()
        heap.close_gaps(least)

    @contextmanager
    def limited(self) -> Iterator[None]:
        """Return all but the smallest freed tensors immediately, inside the context."""
        heap.return_from(_LEAST_RETURNED)
        heap.close_gaps(_LEAST_RETURNED)
        try:
            yield
        finally:
            self._apply_limits()

    def _apply_limits(self) -> None:
        heap.return_from(min([_initial_limit(), *self._limits.values()]))

    def _lift(self, owner: weakref.ref[Any]) -> None:
        self._limits.pop(owner, None)
        if not sys.is_finalizing():
            self._apply_limits()

    def why_not(self) -> str | None:
        """Return the reason why no memory is kept in this process; None if memory is kept.

        Raises:
            ValueError: If the environment variable is neither 0 nor 1.
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
        if has_limit():
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
        if not self._owners and not sys.is_finalizing():  # torch's operators need imports
            self.end()


memory_policy: Final = MemoryPolicy()


def _initial_limit() -> int:
    """Return the size from which glibc returns freed tensors at once, as the user has set it."""
    asked = os.environ.get("MALLOC_MMAP_THRESHOLD_", "")
    return int(asked) if asked.isdecimal() else heap.LARGEST_LIMIT
