"""Errors of a device that is out of memory, with a sentence on what to do."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

Advise = Callable[[], str]
"""Tells what to do about a step that ran out of memory."""

_SIGN = "gact_graph: "


@contextmanager
def advising(advise: Advise | None) -> Iterator[None]:
    """Adds the advice to an OutOfMemoryError from within, unless it has one already.

    Args:
        advise: Asked only if there is such an error. None: there is nothing to say.
    """
    try:
        yield
    except torch.OutOfMemoryError as error:
        if advise is None or _SIGN in str(error):
            raise
        raise torch.OutOfMemoryError(f"{error} {_SIGN}{advise()}") from error
