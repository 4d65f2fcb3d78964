"""A limit on the memory of this process, and how its end looks from outside."""

from __future__ import annotations

import resource
from pathlib import Path

import torch

from experiments.helpers.errors import ExperimentError

_NO_MEMORY = (
    "can't allocate memory",
    "MemoryError",
    "bad_alloc",
    "out of memory",
    # Of cuBLAS and cuSPARSE, for what they take from the device themselves.
    "STATUS_ALLOC_FAILED",
    "STATUS_INSUFFICIENT_RESOURCES",
)


def set_cap(device: torch.device, cap: int) -> None:
    """Limit this process to ``cap`` bytes beyond those that it has now.

    On the CPU it is its own writable memory. On CUDA it is what torch's caching allocator takes
    from the device, blocks that it keeps for later included, so that fragments count. The context
    of CUDA and what libraries take past the allocator are not in it: a card of 16 GB has less than
    16 GB to give.

    Raises:
        ExperimentError: If the device has less memory than that in all.
    """
    if device.type != "cuda":
        # RLIMIT_AS would count the libraries' code too.
        lines = Path("/proc/self/status").read_text().splitlines()
        line = next(line for line in lines if "VmData" in line)
        limit = int(line.split()[1]) * 1024 + cap
        resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
        return
    total = torch.cuda.get_device_properties(device).total_memory
    limit = torch.cuda.memory_allocated(device) + cap
    if limit > total:
        raise ExperimentError(
            f"Expected a cap that leaves the process within the device's {total / 1e9:.1f} GB "
            f"(got {cap / 1e9:.1f} GB beyond the {(limit - cap) / 1e9:.1f} GB of the graph and "
            "the model): give a smaller one"
        )
    # Unlike its neighbours, this function takes no device without a number.
    index = torch.cuda.current_device() if device.index is None else device.index
    torch.cuda.set_per_process_memory_fraction(limit / total, index)


def is_want_of_memory(error: BaseException) -> bool:
    """Return whether Python or torch raised this for want of memory.

    On the CPU torch has no error of its own for that: it raises a plain RuntimeError.
    """
    from_torch = isinstance(error, RuntimeError) and any(
        words in str(error) for words in _NO_MEMORY
    )
    return isinstance(error, MemoryError) or from_torch


def ended_by_memory(code: int, errors: str) -> bool:
    """Whether a process with this exit code and standard error ended for want of memory."""
    # Some libraries end the process where they get no memory.
    return code in (-6, -9) or any(words in errors for words in _NO_MEMORY)
