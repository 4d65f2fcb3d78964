"""Limits that the system sets to the memory of this process, and errors where they are met."""

from __future__ import annotations

import torch

try:
    import resource
except ImportError:  # Windows
    _LIMITS: tuple[int, ...] = ()
else:
    _LIMITS = resource.RLIMIT_AS, resource.RLIMIT_DATA

NO_MEMORY = (
    "can't allocate memory",
    "MemoryError",
    "bad_alloc",
    "out of memory",
    # Of cuBLAS and cuSPARSE, for what they take from the device themselves.
    "STATUS_ALLOC_FAILED",
    "STATUS_INSUFFICIENT_RESOURCES",
    # Of operators of the stable ABI, whose errors have no words.
    "aoti_torch_empty",
    # Of extension modules that get no memory while they are imported.
    "error return without exception set",
)
"""Words of errors that lack of memory raises."""


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether Python or PyTorch raised an error for lack of memory.

    On a CPU, PyTorch raises a plain RuntimeError.
    """
    if isinstance(error, (MemoryError, torch.OutOfMemoryError)):
        return True
    is_plain = isinstance(error, (RuntimeError, SystemError))
    return is_plain and any(words in str(error) for words in NO_MEMORY)


def has_limit() -> bool:
    """Return whether the process has a limit of memory, as by ``ulimit -v`` or ``ulimit -d``.

    The stack of a thread counts towards it. A thread that gets no memory may end before
    :meth:`threading.Thread.start` returns, which then waits forever.
    """
    return any(resource.getrlimit(limit)[0] != resource.RLIM_INFINITY for limit in _LIMITS)
