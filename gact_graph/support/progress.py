"""Lines for work that takes long, so that a user sees what a process is busy with."""

from __future__ import annotations

import contextlib
import logging
import os
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from time import monotonic
from typing import Protocol

import torch

PATIENCE = 2.0
"""Seconds after which the line comes."""

_logger = logging.getLogger("gact_graph")
_told: set[str] = set()

# Launchers set these for each process, before torch.distributed knows of any.
_RANKS = ("RANK", "LOCAL_RANK", "SLURM_PROCID")


class Timer(Protocol):
    """What :func:`later` gives."""

    def cancel(self) -> None: ...


def later(seconds: float, function: Callable[[], None]) -> Timer:
    """Calls a function on another thread, unless that is canceled before."""
    timer = threading.Timer(seconds, function)
    timer.daemon = True
    timer.start()
    return timer


@contextmanager
def telling(work: str) -> Iterator[None]:
    """Says what happens inside if it takes longer than :data:`PATIENCE`, and how long it took.

    Each kind of work is told of once in a process, and by rank 0 alone. Who has set up
    :mod:`logging` to show INFO of ``gact_graph`` gets records; others get lines on stderr, unless
    they have set a higher level for that logger. Each line is whole when it is written: work may
    start within other work, and others write there, too.

    Args:
        work: What happens, as a verb with -ing and what belongs to it.
    """
    if work in _told or not _is_first_rank():
        yield
        return
    line, begun = _Line(work), monotonic()
    timer = later(PATIENCE, line.begin)
    try:
        yield
    finally:
        timer.cancel()
        line.end(monotonic() - begun)


class _Line:
    """What is said of one piece of work: its beginning by a timer, its end by who does it."""

    def __init__(self, work: str) -> None:
        self._work = work
        self._lock = threading.Lock()
        self._ended = False
        self._write: Callable[[str], None] | None = None

    def begin(self) -> None:
        with self._lock:
            # The work may have ended while this thread started, and another thread may do the same.
            if self._ended or self._work in _told:
                return
            _told.add(self._work)
            if _logger.hasHandlers() and _logger.isEnabledFor(logging.INFO):
                self._write = lambda text: _logger.info("%s", text)
            elif not _is_silenced():
                self._write = lambda text: _print(f"gact_graph: {text}\n")
            if self._write is not None:
                self._write(self._work)

    def end(self, seconds: float) -> None:
        with self._lock:
            self._ended = True
            if self._write is not None:
                self._write(f"{self._work} took {seconds:.1f} s")


def _is_silenced() -> bool:
    """Whether the user has asked for less than INFO, of this library or of all."""
    return _logger.level > logging.INFO or logging.root.manager.disable >= logging.INFO


def _print(text: str) -> None:
    # There may be no stderr, or a closed one: that must not end anybody's training.
    with contextlib.suppress(AttributeError, OSError, ValueError):
        sys.stderr.write(text)
        sys.stderr.flush()


def _is_first_rank() -> bool:
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        return torch.distributed.get_rank() == 0
    return all(os.environ.get(name, "0") in ("", "0") for name in _RANKS)
