"""Warnings that name the user's line."""

from __future__ import annotations

import sys
import warnings
from types import FrameType

_BETWEEN = frozenset(
    {"gact_graph", "torch", "torch_geometric", "lightning", "pytorch_lightning"}
    | {"contextlib", "functools", "threading"}
)
"""Packages whose frames may lie between the user's line and what warns."""


def warn(message: str) -> None:
    """Gives a RuntimeWarning at the innermost line that belongs to none of the packages between.

    Where there is none, as on a thread of autograd's own, it names the outermost line.
    """
    frame: FrameType | None = sys._getframe(1)
    level = 2
    while frame is not None and frame.f_back is not None and _is_between(frame):
        frame, level = frame.f_back, level + 1
    warnings.warn(message, RuntimeWarning, stacklevel=level)


def _is_between(frame: FrameType) -> bool:
    # torch.fx runs what it generated in modules without a name.
    generated = frame.f_code.co_filename.startswith("<eval_with_key>")
    package = str(frame.f_globals.get("__name__", "")).partition(".")[0]
    return generated or package in _BETWEEN
