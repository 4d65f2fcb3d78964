"""The C library's heap: handed back where it matters."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable
from typing import Any

import torch


def give_back(device: torch.device) -> None:
    """Hands freed memory of the process back to the system, if ``device`` is the CPU.

    glibc keeps what was freed below 32 MB, for each thread its own, and the large tensors beside it
    never use it: of a forward or a backward that works in blocks this is a node tensor or two that
    the next peak can do without. Where the C library is another one nothing happens.
    """
    if device.type == "cpu":
        _trim()(0)


def give_back_now_and_then(tensor: torch.Tensor) -> None:
    """The same, for each 64 MiB of tensors that are encoded or decoded, where much is free.

    Small objects that live until backward settle in the gaps of freed tensors, which then serve no
    other tensor: without this, part of what is freed of a deep model would stay with the process.
    """
    global _since
    _since += tensor.nbytes
    if _since > _EVERY:
        _since = 0
        if tensor.device.type == "cpu" and _info()().fordblks > _MUCH:
            give_back(tensor.device)


_EVERY = 64 << 20
_since = 0

# What works in blocks has less free between two of them, and would have to fetch it again.
_MUCH = 256 << 20


class _Info(ctypes.Structure):
    """glibc's ``struct mallinfo2``; ``fordblks`` are the free bytes."""

    _fields_ = tuple(
        (name, ctypes.c_size_t)
        for name in (
            *("arena", "ordblks", "smblks", "hblks", "hblkhd", "usmblks", "fsmblks"),
            *("uordblks", "fordblks", "keepcost"),
        )
    )


@functools.cache
def _info() -> Callable[[], Any]:
    try:
        info = ctypes.CDLL(None).mallinfo2
    except (OSError, AttributeError, TypeError):
        return _Info
    info.restype = _Info
    found: Callable[[], Any] = info
    return found


@functools.cache
def _trim() -> Callable[[int], object]:
    try:
        trim: Callable[[int], object] = ctypes.CDLL(None).malloc_trim
    except (OSError, AttributeError, TypeError):
        return lambda pad: None
    return trim
