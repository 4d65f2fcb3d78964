"""Calls of functions in fresh processes, whose memory holds nothing of earlier work.

The child is ``python -m experiments.helpers.process MODULE:FUNCTION ARGUMENTS``; arguments and
result are JSON. A child may have another CPU allocator, and a cap on its memory.
"""

from __future__ import annotations

import ctypes.util
import importlib
import json
import os
import resource
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from experiments.helpers.errors import ExperimentError
from experiments.helpers.origin import ALLOCATOR
from gact_graph.support.memory.limits import NO_MEMORY
from gact_graph.support.memory.policy import SWITCH

OUT_OF_MEMORY = "out of memory"

_TUNED = "dirty_decay_ms:-1,muzzy_decay_ms:-1"

ALLOCATORS = {
    "kept": "gact_graph's kept memory",
    "jemalloc-tuned": f"jemalloc, `{_TUNED}`",
    "jemalloc": "jemalloc, defaults",
    "glibc": "glibc",
}
"""The names of CPU allocators, and their labels in tables."""

CAPPED = {"MALLOC_MMAP_THRESHOLD_": str(4 << 20), "MKL_DISABLE_FAST_MM": "1"}
"""Environment under a cap.

Tensors of 4 MB or more are not part of glibc's heap. In the heap, small objects that live until
backward would fill the gaps of freed tensors, which no other tensor could use from then on: part of
the freed memory would still count, for stock too. And MKL keeps no buffers: it reserves 4 MB for
each and touches a part, but a cap on writable memory counts the whole.
"""


def call(function: str, *arguments: Any, limit: float | None = None) -> Any:
    """Return the result of a function, or ``{"reason": ...}`` if there is none.

    Args:
        function: ``module:function``.
        *arguments: Arguments of the function.
        limit: Seconds after which the process is ended.
    """
    return call_together(function, [arguments], limit=limit)[0]


def call_together(
    function: str,
    calls: Sequence[Sequence[Any]],
    environment: Mapping[str, str] | None = None,
    limit: float | None = None,
) -> list[Any]:
    """Call a function in several processes at once, in another environment; see :func:`call`."""
    processes = [
        subprocess.Popen(
            [sys.executable, "-m", __name__, function, json.dumps(arguments)],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for arguments in calls
    ]
    try:
        return [_result(process, limit) for process in processes]
    finally:
        for process in processes:
            process.kill()
            process.communicate()  # closes its pipes


def _result(process: subprocess.Popen[str], limit: float | None) -> Any:
    try:
        printed, errors = process.communicate(timeout=limit)
    except subprocess.TimeoutExpired:
        return {"reason": f"not finished in {limit} s"}
    if process.returncode == 0:
        return json.loads(printed.splitlines()[-1])
    if ended_by_memory(process.returncode, errors):
        return {"reason": OUT_OF_MEMORY}
    last = (errors.strip().splitlines() or [f"code {process.returncode}"])[-1]
    return {"reason": f"failed: {last[:300]}"}


def checked(result: Any, subject: str, needed: bool = False) -> Any:
    """Return a result of :func:`call`; None if the memory did not suffice and it is not ``needed``.

    Raises:
        ExperimentError: If the call has no result otherwise.
    """
    if "reason" not in result:
        return result
    if result["reason"] == OUT_OF_MEMORY and not needed:
        return None
    raise ExperimentError(f"{subject}: {result['reason']}")


def environment(allocator: str) -> dict[str, str]:
    """Return the environment of a process with a CPU allocator of :data:`ALLOCATORS`.

    Raises:
        ExperimentError: If jemalloc is not installed.
    """
    # Those of the caller may choose another.
    variables = {key: value for key, value in os.environ.items() if key not in ALLOCATOR}
    if allocator == "kept":
        return variables
    variables[SWITCH] = "0"
    if allocator != "glibc":
        library = ctypes.util.find_library("jemalloc")
        if library is None:
            raise ExperimentError(
                "Expected jemalloc's shared library (got none); apt-get install libjemalloc2"
            )
        variables["LD_PRELOAD"] = library
    if allocator == "jemalloc-tuned":
        variables["MALLOC_CONF"] = _TUNED
    return variables


def set_cap(device: torch.device, cap: int) -> None:
    """Limit this process to ``cap`` bytes beyond its present memory.

    On the CPU, the cap counts the writable memory of the process. On CUDA, it counts the memory
    that torch's caching allocator takes from the device, including blocks that the allocator keeps
    for later, so that fragments count. The context of CUDA and memory that libraries take past the
    allocator do not count: a card of 16 GB has less than 16 GB available.

    Raises:
        ExperimentError: If the whole memory of the device is less than that.
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
    # Unlike the functions above, this one accepts no device without a number.
    index = torch.cuda.current_device() if device.index is None else device.index
    torch.cuda.set_per_process_memory_fraction(limit / total, index)


_ALL_ARENAS = 4096  # MALLCTL_ARENAS_ALL


def purge() -> None:
    """Return the memory that jemalloc keeps to the system, where jemalloc is loaded."""
    mallctl = getattr(ctypes.CDLL(None), "mallctl", None)
    if mallctl is not None:
        mallctl(f"arena.{_ALL_ARENAS}.purge".encode(), None, None, None, ctypes.c_size_t(0))


def ended_by_memory(code: int, errors: str) -> bool:
    """Return whether a process with this exit code and standard error lacked memory."""
    # Some libraries end the process if they get no memory.
    return code in (-6, -9) or any(words in errors for words in NO_MEMORY)


if __name__ == "__main__":
    _module, _, _name = sys.argv[1].partition(":")
    _function = getattr(importlib.import_module(_module), _name)
    print(json.dumps(_function(*json.loads(sys.argv[2]))), flush=True)
