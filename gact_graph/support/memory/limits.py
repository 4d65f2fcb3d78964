"""Limits that the system sets to the memory of this process."""

from __future__ import annotations

try:
    import resource
except ImportError:  # Windows
    _LIMITS: tuple[int, ...] = ()
else:
    _LIMITS = resource.RLIMIT_AS, resource.RLIMIT_DATA


def has_limit() -> bool:
    """Return whether the process has a limit of memory, as by ``ulimit -v`` or ``ulimit -d``.

    The stack of a thread counts towards it. A thread that gets no memory may end before
    :meth:`threading.Thread.start` returns, which then waits forever.
    """
    return any(resource.getrlimit(limit)[0] != resource.RLIM_INFINITY for limit in _LIMITS)
