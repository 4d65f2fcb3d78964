"""How much memory a piece of work takes at most."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext

import torch

from gact_graph.ops.allocations import Allocations, watching_allocations
from gact_graph.support.peak import PeakMeter

PROCESS_BYTES = 1 << 19
"""What a step on the CPU takes beside tensors: objects of the interpreter, nodes of autograd,
scratch memory of matrix products. Measured: 0 to 2 MB, mostly less than half of one."""


@contextmanager
def measuring(device: torch.device) -> Iterator[Callable[[Callable[[], None]], int]]:
    """Yields a function that does a piece of work and returns its peak in bytes.

    On the CPU it counts what tensors take; where that cannot be told, the resident set.

    Raises:
        RuntimeError: The system does not tell how much memory the process has.
    """
    with watching_allocations() if device.type == "cpu" else nullcontext() as allocations:
        if allocations is None:
            yield lambda work: _by_peak_meter(device, work)
        else:
            yield lambda work: _by_allocations(allocations, work)


def _by_allocations(allocations: Allocations, work: Callable[[], None]) -> int:
    allocations.restart()
    work()
    return allocations.most_bytes + PROCESS_BYTES


def _by_peak_meter(device: torch.device, work: Callable[[], None]) -> int:
    with PeakMeter(device, collect=False) as meter:
        before = meter.current_bytes() or 0
        work()
    if meter.peak_bytes is None:
        raise RuntimeError(
            "Expected a system that tells how much memory a process has, as Linux in /proc "
            "(got none); give bits=, level= and blocks= in place of memory="
        )
    return meter.peak_bytes - before
