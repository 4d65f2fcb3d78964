"""Warnings that name the user's line, and advice in errors of a device that is out of memory."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

import torch

Advise = Callable[[], str]
"""Returns a sentence on how to fit a step that ran out of memory."""

_PREFIX = "gact_graph: "

_BETWEEN = frozenset(
    {"gact_graph", "torch", "torch_geometric", "lightning", "pytorch_lightning"}
    | {"contextlib", "functools", "threading"}
)
"""Packages whose frames may lie between the user's line and a warning."""


def warn(message: str) -> None:
    """Issue a RuntimeWarning at the innermost line outside of the packages between.

    Without such a line, as on autograd's threads, the warning names the outermost line.
    """
    frame: FrameType | None = sys._getframe(1)
    level = 2
    while frame is not None and frame.f_back is not None and _is_between(frame):
        frame, level = frame.f_back, level + 1
    warnings.warn(message, RuntimeWarning, stacklevel=level)


def _is_between(frame: FrameType) -> bool:
    # torch.fx runs generated code in modules without a name.
    generated = frame.f_code.co_filename.startswith("<eval_with_key>")
    package = str(frame.f_globals.get("__name__", "")).partition(".")[0]
    return generated or package in _BETWEEN


@contextmanager
def advising(advise: Advise | None) -> Iterator[None]:
    """Add advice to an OutOfMemoryError that is raised inside the context, unless it has advice.

    Args:
        advise: Called after such an error; None for no advice.
    """
    try:
        yield
    except torch.OutOfMemoryError as error:
        if advise is None or _PREFIX in str(error):
            raise
        raise torch.OutOfMemoryError(f"{error} {_PREFIX}{advise()}") from error
