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


def give_back_now_and_then(tensor: torch.Tensor) -> None:
    """The same after each 128 MiB of tensors that are encoded or decoded and may be of the heap.

    Small objects that live until backward settle in the gaps of freed tensors, which then serve no
    other tensor: without this, part of what is freed of a deep model would stay with the process.
    """
    global _since
    if tensor.nbytes < _MAPPED:
        _since += tensor.nbytes
    if _since > _EVERY:
        _since = 0
        give_back(tensor.device)


# From this size on glibc maps memory for each tensor, and hands it back when that is freed.
_MAPPED = 32 << 20

# Pages that are needed again right away cost time.
_EVERY = 128 << 20
_since = 0


@functools.cache
def _trim() -> Callable[[int], object]:
    try:
        trim: Callable[[int], object] = ctypes.CDLL(None).malloc_trim
    except (OSError, AttributeError, TypeError):
        return lambda pad: None
    return trim
