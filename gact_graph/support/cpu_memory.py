"""Memory of freed tensors on the CPU: when it is kept, how long, and when it goes back.

torch returns a large freed tensor to the system, and fetches the pages of the next one anew, which
takes a third to a half of a training step. From the first step of a wrapped model on, tensors of
64 KiB or more take what earlier ones have left (``csrc/cpu/kept_memory.cpp``). What is kept and
what is in use never exceed together what was in use at some moment of this step or of the last, so
that the process peaks no higher. On CUDA, torch's own allocator does the same.

All of it goes back when the last wrapped model dies, when one is unwrapped, and when no wrapped
model has begun a step for a while. Nothing is kept where the process has a limit on its addresses,
or where another allocator serves it, which keeps memory itself. The environment variable
``GACT_GRAPH_KEEP_MEMORY`` overrules the last.

What is below 64 KiB stays with the C library, whose heap is trimmed where it matters.
"""

from __future__ import annotations

import ctypes
import functools
import os
import sys
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

SWITCH = "GACT_GRAPH_KEEP_MEMORY"
"""The environment variable: 1 keeps memory, 0 never does; unset, it depends on the allocator."""

IDLE_SECONDS = 10.0
"""What is kept goes back if no step begins for so long, and twice the time between the last two."""


class _Keeper:
    """The keeper of this process.

    Attributes:
        library: The compiled operators; None before they are loaded, when nothing can be kept.
        owners: References to what has begun a step and lives.
        last: When the last step began.
    """

    def __init__(self) -> None:
        self.library: Any = None
        self.owners: set[weakref.ref[Any]] = set()
        self.last = float("inf")

    def start_step(self) -> None:
        if self.library is None:
            return
        if why_not() is not None:
            self.library.end_keeping()
            return
        now = time.monotonic()
        self.library.start_keeping(IDLE_SECONDS + 2 * max(0.0, now - self.last))
        self.last = now

    def forget(self, owner: weakref.ref[Any]) -> None:
        self.owners.discard(owner)
        if not self.owners:
            end()


_keeper = _Keeper()


def use(library: Any) -> None:
    """Takes the compiled operators. What needs them first is a training step, which goes on."""
    _keeper.library = library
    _keeper.start_step()


def start_step(owner: object) -> None:
    """A training step begins; memory is kept from now on while ``owner`` lives.

    Raises:
        ValueError: The environment variable is neither 0 nor 1.
    """
    _keeper.owners.add(weakref.ref(owner, _keeper.forget))
    _keeper.start_step()


def end() -> None:
    """Returns what is kept to the system, and keeps nothing until the next step."""
    if _keeper.library is not None:
        _keeper.library.end_keeping()


def why_not() -> str | None:
    """Why no memory is kept in this process; None where it is, from a wrapped model's first step.

    Raises:
        ValueError: The environment variable is neither 0 nor 1.
    """
    asked = os.environ.get(SWITCH, "")
    if asked not in ("", "0", "1"):
        raise ValueError(
            f"Expected the environment variable {SWITCH} to be 0 or 1 (got {asked!r}); unset it to "
            "keep memory where no other allocator serves the process"
        )
    if asked == "0":
        return f"{SWITCH}=0"
    if sys.platform != "linux":
        return "needs Linux"
    if _has_limit():
        return "the process has a limit on its address space (ulimit -v or -d)"
    other = _allocator()
    if other is not None and asked != "1":
        return f"{other} serves memory; {SWITCH}=1 keeps it all the same"
    return None


def _has_limit() -> bool:
    import resource  # not on every system

    limits = (resource.RLIMIT_AS, resource.RLIMIT_DATA)
    return any(resource.getrlimit(one)[0] != resource.RLIM_INFINITY for one in limits)


class _Place(ctypes.Structure):
    """The C library's ``Dl_info``: the file that an address comes from."""

    _fields_ = (
        ("file", ctypes.c_char_p),
        ("base", ctypes.c_void_p),
        ("name", ctypes.c_char_p),
        ("address", ctypes.c_void_p),
    )


@functools.cache
def _allocator() -> str | None:
    """The file whose ``malloc`` serves the process; None if that is the C library's."""
    find, places = _of_libc("dladdr"), []
    for name in ("malloc", "getpid"):
        function, place = _of_libc(name), _Place()
        if find is None or function is None:
            return None
        if not find(ctypes.cast(function, ctypes.c_void_p), ctypes.byref(place)):
            return None
        places.append(place)
    malloc, libc = places
    return None if malloc.base == libc.base else Path(os.fsdecode(malloc.file)).name


def give_back(device: torch.device) -> None:
    """Hands freed memory of the process back to the system, if ``device`` is the CPU.

    glibc keeps what was freed below 32 MB, for each thread its own, and the large tensors beside it
    never use it: of a forward or a backward that works in blocks this is a node tensor or two that
    the next peak can do without. Where the C library is another one nothing happens.
    """
    if device.type == "cpu":
        _trim()(0)


def give_back_all(device: torch.device) -> None:
    """As :func:`give_back`, with the memory that is kept for the tensors of the next step."""
    if device.type == "cpu":
        end()
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
