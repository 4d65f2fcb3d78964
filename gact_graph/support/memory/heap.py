"""The heap of the C library. Nothing here does anything where that is not glibc."""

from __future__ import annotations

import ctypes
import functools
import os
from pathlib import Path
from typing import Any

LARGEST_LIMIT = 32 << 20
"""The size in bytes up to which glibc raises the limit of :func:`return_from` by itself."""

_M_MMAP_THRESHOLD = -3


def trim() -> None:
    """Return free pages to the system."""
    function = _function("malloc_trim")
    if function is not None:
        function(0)


def free_bytes() -> int:
    """Return how many bytes of the heap are free; 0 where that is unknown."""
    return _info().free


def return_from(least: int) -> None:
    """Return freed blocks of at least ``least`` bytes to the system at once, from now on.

    By itself glibc raises that limit up to 32 MiB. What is below stays with the process, in pieces
    that may serve no other tensor: GAT in blocks peaked at 216 MB for 65 MB of tensors.
    """
    function = _function("mallopt")
    if function is not None:
        function(_M_MMAP_THRESHOLD, least)


def close_gaps(least: int) -> None:
    """Take gaps of at least ``least`` bytes out of the heap; they hold addresses, and no memory.

    The limit of :func:`return_from` holds for blocks that fit into no gap: others would go there,
    and stay when they are freed. A heterogeneous SAGE peaked at 88 MB for 66 MB of tensors.
    """
    trim()
    allocate, free = _function("malloc"), _function("free")
    if allocate is None or free is None:
        return
    allocate.restype, allocate.argtypes = ctypes.c_void_p, (ctypes.c_size_t,)
    free.restype, free.argtypes = None, (ctypes.c_void_p,)
    size = 1 << free_bytes().bit_length()
    while size >= least:
        mapped = _info().mapped_blocks
        gap = allocate(size)
        if not gap or _info().mapped_blocks > mapped:  # no gap of this size is left
            free(gap)
            size //= 2


@functools.cache
def allocator() -> str | None:
    """Return the file whose ``malloc`` serves the process; None if that is the C library's."""
    find, places = _function("dladdr"), []
    for name in ("malloc", "getpid"):
        function, place = _function(name), _Place()
        if find is None or function is None:
            return None
        if not find(ctypes.cast(function, ctypes.c_void_p), ctypes.byref(place)):
            return None
        places.append(place)
    malloc, libc = places
    return None if malloc.base == libc.base else Path(os.fsdecode(malloc.file)).name


class _Place(ctypes.Structure):
    """The C library's ``Dl_info``: the file that an address comes from."""

    _fields_ = (
        ("file", ctypes.c_char_p),
        ("base", ctypes.c_void_p),
        ("name", ctypes.c_char_p),
        ("address", ctypes.c_void_p),
    )


class _Info(ctypes.Structure):
    """glibc's ``struct mallinfo2``."""

    _fields_ = tuple(
        (name, ctypes.c_size_t)
        for name in (
            *("arena", "free_chunks", "fast_chunks", "mapped_blocks", "mapped_bytes"),
            *("unused", "fast_bytes", "used", "free", "top"),
        )
    )


def _info() -> Any:
    function = _function("mallinfo2")
    if function is None:
        return _Info()
    function.restype = _Info
    return function()


@functools.cache
def _function(name: str) -> Any:
    """Return a function of the C library; None where there is none of that name."""
    try:
        return getattr(ctypes.CDLL(None), name)
    except (OSError, AttributeError, TypeError):
        return None
