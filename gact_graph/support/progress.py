"""One line that shows the long work of the library while it lasts."""

from __future__ import annotations

import contextlib
import logging
import os
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from rich.console import Console
from rich.live import Live
from rich.spinner import Spinner
from rich.text import Text

from gact_graph.support.memory.limits import has_limit

PATIENCE = 1.0
"""Seconds after which work is shown."""

_logger = logging.getLogger("gact_graph")
_logged: set[str] = set()
_lock = threading.Lock()
_shown: list[str] = []  # the work under way on the terminal; the innermost, last, has the line
_line: Live | None = None

# Launchers set these for each process before torch.distributed is initialized.
_RANKS = ("RANK", "LOCAL_RANK", "SLURM_PROCID")


def later(seconds: float, function: Callable[[], None]) -> threading.Timer:
    """Call a function on another thread after some time, unless the timer is canceled before."""
    timer = threading.Timer(seconds, function)
    timer.daemon = True
    with contextlib.suppress(RuntimeError):  # no more threads: the function is never called
        timer.start()
    return timer


@contextmanager
def progress(work: str, patience: float = PATIENCE) -> Iterator[None]:
    """Show the work inside the context if it takes longer than a second, on rank 0 only.

    A terminal has one line for all work under way, until the work ends. Elsewhere, as in a notebook
    or a file, one line is written to stderr, once per process for each kind of work; it is a record
    of the logger ``gact_graph`` if :mod:`logging` is set up to show INFO. Nothing is shown if that
    logger has a higher level, or the memory of the process is limited, since a thread needs some.

    Args:
        work: The work, as in ``"compiling kernels"``.
        patience: Seconds after which the work is shown.
    """
    if has_limit() or not _is_first_rank():
        yield
        return
    started = ended = False

    def start() -> None:
        nonlocal started
        with _lock:
            # The work may have ended while this thread started.
            started = not ended and _show(work)

    timer = later(max(0.0, patience), start)
    try:
        yield
    finally:
        timer.cancel()
        with _lock:
            ended = True
            if started:
                _shown.remove(work)
                _draw()


def _show(work: str) -> bool:
    """Show work on the terminal and return True, or write a line."""
    # Without stderr, or with one that is closed or hung up, training continues.
    with contextlib.suppress(AttributeError, OSError, ValueError):
        if _logger.hasHandlers() and _logger.isEnabledFor(logging.INFO):
            if work not in _logged:
                _logger.info("%s", work)
        elif _logger.level > logging.INFO or logging.root.manager.disable >= logging.INFO:
            return False
        elif sys.stderr.isatty() and Console(stderr=True).is_interactive:
            _shown.append(work)
            _draw()
            return True
        elif work not in _logged:
            # One call writes a whole line, since other threads write there, too.
            sys.stderr.write(f"gact_graph: {work}\n")
            sys.stderr.flush()
    _logged.add(work)
    return False


def _draw() -> None:
    """Show the innermost work on the line, which disappears with the last."""
    global _line
    line, spinner = _line, Spinner("line", Text(f"gact_graph: {' '.join(_shown[-1:])}"))
    with contextlib.suppress(OSError, RuntimeError, ValueError):  # RuntimeError: no thread
        if line is None:
            _line = Live(
                spinner,
                console=Console(stderr=True),
                refresh_per_second=8,
                transient=True,
                redirect_stdout=False,
                redirect_stderr=False,
            )
            _line.start(refresh=True)
        elif _shown:
            line.update(spinner, refresh=True)
        else:
            _line = None
            line.stop()


def _is_first_rank() -> bool:
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        return torch.distributed.get_rank() == 0
    return all(os.environ.get(name, "0") in ("", "0") for name in _RANKS)
