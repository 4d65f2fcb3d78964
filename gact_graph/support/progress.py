"""Lines that report long work of the library while it lasts."""

from __future__ import annotations

import contextlib
import logging
import os
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from time import monotonic

import torch

PATIENCE = 2.0
"""Seconds after which work is reported."""

_logger = logging.getLogger("gact_graph")
_reported: set[str] = set()

# Launchers set these for each process before torch.distributed is initialized.
_RANKS = ("RANK", "LOCAL_RANK", "SLURM_PROCID")


def later(seconds: float, function: Callable[[], None]) -> threading.Timer:
    """Call a function on another thread after some time, unless the timer is canceled before."""
    timer = threading.Timer(seconds, function)
    timer.daemon = True
    timer.start()
    return timer


@contextmanager
def log_if_slow(work: str) -> Iterator[None]:
    """Report the work inside the context if it takes longer than :data:`PATIENCE`.

    A line is written then, and another one with the duration at the end; once per process for each
    kind of work, and by rank 0 only. The lines are records of the logger ``gact_graph`` if
    :mod:`logging` is set up to show INFO, and else go to stderr, unless that logger has a higher
    level.

    Args:
        work: The work, as in ``"compiling kernels"``.
    """
    if work in _reported or not _is_first_rank():
        yield
        return
    lock, begun = threading.Lock(), monotonic()
    reported = ended = False

    def report() -> None:
        nonlocal reported
        with lock:
            # The work may have ended while this thread started, or another thread does the same.
            if not ended and work not in _reported:
                reported = True
                _reported.add(work)
                _write(work)

    timer = later(PATIENCE, report)
    try:
        yield
    finally:
        timer.cancel()
        with lock:
            ended = True
            if reported:
                _write(f"{work} took {monotonic() - begun:.1f} s")


def _write(line: str) -> None:
    if _logger.hasHandlers() and _logger.isEnabledFor(logging.INFO):
        _logger.info("%s", line)
    elif _logger.level <= logging.INFO and logging.root.manager.disable < logging.INFO:
        # Without stderr, or with a closed one, training continues. One call writes a whole line,
        # since other threads write there, too.
        with contextlib.suppress(AttributeError, OSError, ValueError):
            sys.stderr.write(f"gact_graph: {line}\n")
            sys.stderr.flush()


def _is_first_rank() -> bool:
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        return torch.distributed.get_rank() == 0
    return all(os.environ.get(name, "0") in ("", "0") for name in _RANKS)
