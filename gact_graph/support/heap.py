"""The C library's heap: handed back where it matters."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
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


def also_give_back(own: Callable[[], None]) -> None:
    """Has :func:`give_back_all` call this first: it gives back what others keep."""
    _others.append(own)


def give_back_all(device: torch.device) -> None:
    """As :func:`give_back`, with the memory that is kept for the tensors of the next step."""
    for own in _others:
        own()
    give_back(device)


def give_back_now_and_then(tensor: torch.Tensor) -> None:
    """The same, for each 64 MiB of tensors that are encoded or decoded, where much is free.

    Small objects that live until backward settle in the gaps of freed tensors, which then serve no
    other tensor: without this, part of what is freed of a deep model would stay with the process.
    """
    global _since
    if tensor.layout == torch.strided:  # a COO matrix has no nbytes
        _since += tensor.nbytes
    if _since > _EVERY:
        _since = 0
        if tensor.device.type == "cpu" and _info()().fordblks > _MUCH:
            give_back(tensor.device)


def return_tensors(least: int) -> None:
    """Has each freed tensor of ``least`` bytes or more handed back to the system at once, for good.

    By itself glibc raises that limit up to 32 MiB, and what is below stays with the process, in
    pieces that may serve no other tensor: GAT in blocks peaked at 216 MB for 65 MB of tensors.
    Memory that is fetched anew takes longer.
    """
    _mallopt()(_M_MMAP_THRESHOLD, least)
    _close_gaps(least)


def _close_gaps(least: int) -> None:
    """Takes gaps of ``least`` bytes or more out of the heap; they hold addresses, and no memory.

    The limit counts only for what finds no gap: a tensor that fits into one left by an earlier
    forward would go there, and stay when it is freed. A heterogeneous SAGE peaked at 88 MB for
    66 MB of tensors.
    """
    _trim()(0)
    info, size = _info(), 1 << int(_info()().fordblks).bit_length()
    while size >= least:
        fetched = info().hblks
        gap = _malloc()(size)
        if not gap or info().hblks > fetched:  # there is no gap of this size any more
            _free()(gap)
            size //= 2


@contextmanager
def returning_tensors(least: int) -> Iterator[None]:
    """The same inside; afterwards the limit is the largest that glibc would have gone to."""
    return_tensors(least)
    try:
        yield
    finally:
        _mallopt()(_M_MMAP_THRESHOLD, _MOST)


LEAST_RETURNED = 1 << 15
"""The lowest sensible limit for :func:`return_tensors`: eight pages. What is returned is rounded up
to whole pages, which would show with a lower one."""

_M_MMAP_THRESHOLD = -3
_MOST = 32 << 20

_others: list[Callable[[], None]] = []

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
    info = _of_libc("mallinfo2")
    if info is None:
        return _Info
    info.restype = _Info
    found: Callable[[], Any] = info
    return found


def _trim() -> Callable[[int], object]:
    return _of_libc("malloc_trim") or (lambda pad: None)


def _mallopt() -> Callable[[int, int], object]:
    return _of_libc("mallopt") or (lambda parameter, value: None)


@functools.cache
def _malloc() -> Callable[[int], int | None]:
    found = _of_libc("malloc")
    found.restype, found.argtypes = ctypes.c_void_p, (ctypes.c_size_t,)
    allocate: Callable[[int], int | None] = found
    return allocate


@functools.cache
def _free() -> Callable[[int | None], None]:
    found = _of_libc("free")
    found.restype, found.argtypes = None, (ctypes.c_void_p,)
    free: Callable[[int | None], None] = found
    return free


@functools.cache
def _of_libc(name: str) -> Any:
    """A function of the C library; None where it has none of that name."""
    try:
        return getattr(ctypes.CDLL(None), name)
    except (OSError, AttributeError, TypeError):
        return None
