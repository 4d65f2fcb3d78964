"""Requests to the heap of the C library. Without glibc they have no effect."""

from __future__ import annotations

import ctypes
import functools
import os
from pathlib import Path
from typing import Any

LARGEST_LIMIT = 32 << 20
"""The size in bytes to which glibc raises the threshold of :func:`return_from` by itself."""

_M_MMAP_THRESHOLD = -3


def trim() -> None:
    """Return free pages of the heap to the system."""
    function = _function("malloc_trim")
    if function is not None:
        function(0)


def free_bytes() -> int:
    """Return the number of free bytes in the heap; 0 without glibc."""
    return _info().free


def return_from(least: int) -> None:
    """From now on, return freed blocks of at least ``least`` bytes to the system immediately.

    By default, glibc raises this threshold up to 32 MiB, and smaller blocks remain with the process
    in pieces that may fit no other tensor: GAT in blocks peaked at 216 MB with 65 MB of tensors.
    """
    function = _function("mallopt")
    if function is not None:
        function(_M_MMAP_THRESHOLD, least)


def close_gaps(least: int) -> None:
    """Occupy the addresses of all gaps of at least ``least`` bytes in the heap, without memory.

    The threshold of :func:`return_from` does not apply to blocks that fit into a gap: they would
    remain there when freed. A heterogeneous SAGE peaked at 88 MB with 66 MB of tensors.
    """
    trim()
    if allocator() is not None:
        return  # the counts of another allocator do not say when a gap is full
    allocate, free = _function("malloc"), _function("free")
    if allocate is None or free is None:
        return
    allocate.restype, allocate.argtypes = ctypes.c_void_p, (ctypes.c_size_t,)
    free.restype, free.argtypes = None, (ctypes.c_void_p,)
    size = 1 << free_bytes().bit_length()
    while size >= least:
        mapped = _info().mapped_blocks
        gap = allocate(size)
        if not gap or _info().mapped_blocks > mapped:  # no gap of this size remains
            free(gap)
            size //= 2


@functools.cache
def allocator() -> str | None:
    """Return the file name of a library that replaces ``malloc``; None without a replacement."""
    find, sources = _function("dladdr"), []
    for name in ("malloc", "getpid"):
        function, source = _function(name), _Source()
        if find is None or function is None:
            return None
        if not find(ctypes.cast(function, ctypes.c_void_p), ctypes.byref(source)):
            return None
        sources.append(source)
    malloc, libc = sources
    return None if malloc.base == libc.base else Path(os.fsdecode(malloc.file)).name


class _Source(ctypes.Structure):
    """``Dl_info`` of the C library: the file that contains an address."""

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
    """Return a function of the C library; None if it has no function of this name."""
    try:
        return getattr(ctypes.CDLL(None), name)
    except (OSError, AttributeError, TypeError):
        return None
