"""The time to offload tensors and to fetch them, by a short trial."""

from __future__ import annotations

import functools
import os
import shutil
import tempfile
from pathlib import Path
from time import perf_counter

import torch

from gact_graph.codecs.offload.files import Files
from gact_graph.support.clock import seconds_on

_BYTES = 16 << 20
"""The size of the trial: with fewer bytes, delays of single accesses count most."""

_PIECE = 1 << 20
"""The size of a piece in which a CPU writes and reads them: the memory that the trial takes."""

_IN_MEMORY = ("tmpfs", "ramfs")


def seconds_of_byte(device: torch.device, nbytes: float) -> float | None:
    """Return the seconds to offload a byte and to fetch it.

    For a CPU, the time is that of the disk, as if the system had no memory to keep files in.

    Args:
        device: The device of the tensors.
        nbytes: The bytes to offload at the same time.

    Returns:
        The seconds; None if ``nbytes`` do not fit, or the folder of temporary files is in memory
        or cannot be written.
    """
    if device.type == "cuda":
        return _seconds_of_pinned(device)
    try:
        folder = Path(tempfile.gettempdir())
        if shutil.disk_usage(folder).free < nbytes or _filesystem(folder) in _IN_MEMORY:
            return None
        return _seconds_of_disk(folder)
    except OSError:
        return None


def can_offload(device: torch.device) -> bool:
    """Return whether a tensor can be offloaded: for a CPU, whether a file can be written."""
    if device.type == "cuda":
        return True
    try:
        Files().buffer(1)
    except OSError:
        return False
    return True


@functools.cache
def _seconds_of_disk(folder: Path) -> float:
    piece, starts = bytearray(os.urandom(_PIECE)), range(0, _BYTES, _PIECE)  # compresses nowhere
    with tempfile.TemporaryFile(dir=folder, buffering=0) as file:
        descriptor, durations = file.fileno(), []
        os.posix_fallocate(descriptor, 0, _BYTES)
        for _ in range(2):  # the first pass takes the pages of the cache from the system
            start = perf_counter()
            for place in starts:
                os.pwrite(descriptor, piece, place)
            os.fdatasync(descriptor)
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
            for place in starts:
                os.preadv(descriptor, [piece], place)
            durations.append(perf_counter() - start)
    return min(durations) / _BYTES


@functools.cache
def _seconds_of_pinned(device: torch.device) -> float:
    host = torch.empty(_BYTES, dtype=torch.uint8, device="cpu", pin_memory=True)
    tensor, durations = host.to(device), []
    for _ in range(2):
        start = seconds_on(device)
        host.copy_(tensor, non_blocking=True)
        tensor.copy_(host, non_blocking=True)
        durations.append(seconds_on(device) - start)
    return min(durations) / _BYTES


def _filesystem(folder: Path) -> str | None:
    """Return the type of the file system of a folder; None if it is unknown."""
    number = folder.stat().st_dev
    device = f"{os.major(number)}:{os.minor(number)}"
    try:
        lines = Path("/proc/self/mountinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return None
    # Fields of proc_pid_mountinfo(5): the device is the third, the type follows a hyphen.
    found = (line for line in lines if line.split()[2] == device)
    return next((line.partition(" - ")[2].split()[0] for line in found), None)
