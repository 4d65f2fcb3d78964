"""Peak memory of a stretch of work: CUDA's allocator, or the resident set of the process."""

from __future__ import annotations

import gc
import os
import threading
from collections.abc import Callable
from pathlib import Path
from types import TracebackType

import torch

from gact_graph.support.memory.policy import memory_policy

_STATM = Path("/proc/self/statm")
_STATUS = Path("/proc/self/status")
_CLEAR_REFS = Path("/proc/self/clear_refs")
_INTERVAL = 0.005  # seconds between two looks at the resident set


class PeakMeter:
    """Measures the most memory held at once inside a ``with`` block.

    On CUDA it is the allocator's maximum in bytes, everything on the device included. On CPU it is
    the resident set *over its value at the start*: the kernel's own high-water mark, which misses
    nothing and takes no time, and which entering the block resets for the whole process. Where that
    cannot be reset, a thread looks every 5 ms, so that a shorter spike may be missed; where the
    system has no ``/proc``, the peak is unknown.

    Args:
        device: What to measure.
        collect: Whether garbage is collected first, which takes long in a large process.
    """

    def __init__(self, device: torch.device, collect: bool = True) -> None:
        self._device = device
        self._collect = collect
        self._start = 0
        self._most = 0
        self._look: Callable[[], int] | None = None  # while it measures on the CPU
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None

    @property
    def peak_bytes(self) -> int | None:
        """The peak so far, in bytes; ``None`` where it cannot be known."""
        if self._device.type == "cuda":
            return torch.cuda.max_memory_allocated(self._device)
        if not _STATM.exists():
            return None
        if self._look is not None:
            self._most = max(self._most, self._look())
        return max(self._most - self._start, 0)

    def current_bytes(self) -> int | None:
        """What is held now, counted as the peak is."""
        if self._device.type == "cuda":
            return torch.cuda.memory_allocated(self._device)
        return _resident_bytes() - self._start if _STATM.exists() else None

    def __enter__(self) -> PeakMeter:
        if self._collect:
            gc.collect()
        if self._device.type == "cuda":
            torch.cuda.empty_cache()  # what was kept for later must not count as reserved
            torch.cuda.reset_peak_memory_stats(self._device)
        elif _STATM.exists():
            memory_policy.give_back(
                self._device
            )  # what an earlier run left there would hide in the start
            self._start = self._most = _resident_bytes()
            if _reset_high_water():
                self._look = _high_water_bytes
            else:
                self._look = _resident_bytes
                self._thread = threading.Thread(target=self._watch, name="PeakMeter", daemon=True)
                self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self._thread is not None:
            self._stop.set()
            self._thread.join()
        if self._look is not None:
            self._most = max(self._most, self._look())
            self._look = None

    def _watch(self) -> None:
        while not self._stop.wait(_INTERVAL):
            self._most = max(self._most, _resident_bytes())


def peak_so_far(device: torch.device) -> int | None:
    """The most that was held at once until now, in bytes; None where the system does not tell.

    On CUDA it is what the allocator had handed out; elsewhere the resident set of the process.
    """
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return _high_water_bytes() if _STATUS.exists() else None


def resident_bytes() -> int | None:
    """What the process has in memory; None where the system does not tell."""
    return _resident_bytes() if _STATM.exists() else None


def _resident_bytes() -> int:
    return int(_STATM.read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def _high_water_bytes() -> int:
    line = next(line for line in _STATUS.read_text().splitlines() if line.startswith("VmHWM:"))
    return int(line.split()[1]) << 10


def _reset_high_water() -> bool:
    try:
        _CLEAR_REFS.write_text("5")
    except OSError:
        return False
    return True
