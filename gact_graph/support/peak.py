"""Peak memory of a block of code: of CUDA's allocator, or of the process's resident set."""

from __future__ import annotations

import gc
import os
import threading
from collections.abc import Iterable
from pathlib import Path
from time import perf_counter

import torch
from torch import Tensor

from gact_graph.support.memory.policy import memory_policy
from gact_graph.support.torch_private import at_end_of_backward

_STATM = Path("/proc/self/statm")
_STATUS = Path("/proc/self/status")
_CLEAR_REFS = Path("/proc/self/clear_refs")
_INTERVAL = 0.005  # seconds between two samples of the resident set


class PeakMeter:
    """Measure the peak memory inside a ``with`` block.

    On CUDA, the peak is the maximum of the allocator, including all tensors from before the block.
    On a CPU, it is the increase of the resident set over its size at the start, by the high-water
    mark of the kernel, which entering the block resets for the whole process. Where the mark cannot
    be reset, a thread samples the resident set every 5 ms and may miss shorter peaks.

    Args:
        device: The device whose memory is measured.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._start = self._most = 0
        self._running = False
        self._stop = threading.Event()
        self._sampler: threading.Thread | None = None

    @property
    def peak_bytes(self) -> int | None:
        """The peak so far in bytes; None on systems without ``/proc``."""
        if self._device.type == "cuda":
            return torch.cuda.max_memory_allocated(self._device)
        if not _STATM.exists():
            return None
        if self._running:
            self._update()
        return max(self._most - self._start, 0)

    def __enter__(self) -> PeakMeter:
        gc.collect()
        if self._device.type == "cuda":
            torch.cuda.empty_cache()  # cached memory must not count as reserved
            torch.cuda.reset_peak_memory_stats(self._device)
        elif _STATM.exists():
            memory_policy.release(self._device)  # reused free memory would not raise the peak
            self._start = self._most = resident_bytes() or 0
            self._running = True
            self._stop.clear()
            if not _reset_high_water():
                self._sampler = threading.Thread(target=self._sample, name="PeakMeter", daemon=True)
                self._sampler.start()
        return self

    def __exit__(self, *error: object) -> None:
        if self._sampler is not None:
            self._stop.set()
            self._sampler.join()
        if self._running:
            self._update()
            self._running = False

    def _update(self) -> None:
        now = _high_water_bytes() if self._sampler is None else resident_bytes()
        self._most = max(self._most, now or 0)

    def _sample(self) -> None:
        while not self._stop.wait(_INTERVAL):
            self._update()


class StepPeak:
    """The peak of training steps, above the memory in use when each step began, and their pace.

    Unlike :class:`PeakMeter` it resets nothing: it knows the peak of a step only if the step raised
    the peak of the process, or of CUDA's allocator. Memory that is in use between steps belongs to
    the training loop, or is kept for the next step.

    Args:
        device: The device whose memory is measured.

    Attributes:
        nbytes: The largest known peak in bytes; 0 before.
        pace: The least seconds of a step, from the start of forward to the end of backward, for
            each node and edge of its graph; None before.
    """

    def __init__(self, device: torch.device) -> None:
        self.nbytes: int = 0
        self.pace: float | None = None
        self._device = device
        self._start = 0
        self._size, self._began = 1, 0.0
        self._high: int | None = None

    def begin(self, size: int) -> None:
        """Begin a step.

        Args:
            size: The number of nodes and edges of its graph.
        """
        self._size, self._began = max(1, size), perf_counter()
        self._high = peak_so_far(self._device)
        is_cuda = self._device.type == "cuda"
        in_use = torch.cuda.memory_allocated(self._device) if is_cuda else resident_bytes()
        self._start = in_use or 0

    def end_after(self, outputs: Iterable[Tensor]) -> None:
        """End the step after the next backward through one of these tensors.

        Args:
            outputs: The outputs of forward.
        """
        node = next((t.grad_fn for t in outputs if t.grad_fn is not None), None)
        if node is not None:
            node.register_prehook(self._queue)

    def _queue(self, gradients: object) -> None:
        at_end_of_backward(self._end)

    def _end(self) -> None:
        pace = (perf_counter() - self._began) / self._size
        self.pace = pace if self.pace is None else min(pace, self.pace)
        high, before = peak_so_far(self._device), self._high
        if high is not None and before is not None and high > before:
            self.nbytes = max(self.nbytes, high - self._start)
            self._high = high


def total_bytes(device: torch.device) -> int | None:
    """Return the memory of a CUDA device, or of this machine, in bytes; None if unknown."""
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).total_memory
    try:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (AttributeError, OSError, ValueError):
        return None


def peak_so_far(device: torch.device) -> int | None:
    """Return the peak memory of this process in bytes; None on systems without ``/proc``.

    On CUDA, it is the maximum of the allocator; elsewhere, of the resident set.
    """
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return _high_water_bytes() if _STATUS.exists() else None


def resident_bytes() -> int | None:
    """Return the resident set of this process in bytes; None on systems without ``/proc``."""
    if not _STATM.exists():
        return None
    return int(_STATM.read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def _high_water_bytes() -> int | None:
    lines = _STATUS.read_text().splitlines()  # gVisor's have no such line
    line = next((line for line in lines if line.startswith("VmHWM:")), None)
    return None if line is None else int(line.split()[1]) << 10


def _reset_high_water() -> bool:
    try:
        _CLEAR_REFS.write_text("5")
    except OSError:
        return False
    return True
