"""The C library's heap: handed back where it matters."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable

import torch


def give_back(device: torch.device) -> None:
    """Hands freed memory of the process back to the system, if ``device`` is the CPU.

    glibc keeps what was freed below 32 MB, for each thread its own, and the large tensors beside it
    never use it: of a forward or a backward that works in blocks this is a node tensor or two that
    the next peak can do without. Where the C library is another one nothing happens.
    """
    if device.type == "cpu":
        _trim()(0)


@functools.cache
def _trim() -> Callable[[int], object]:
    try:
        trim: Callable[[int], object] = ctypes.CDLL(None).malloc_trim
    except (OSError, AttributeError, TypeError):
        return lambda pad: None
    return trim
