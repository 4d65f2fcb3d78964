"""CPU allocators for a training step, as environments of its process."""

from __future__ import annotations

import ctypes.util
import os

from experiments.helpers.errors import ExperimentError
from gact_graph.support.memory.policy import SWITCH

_TUNED = "dirty_decay_ms:-1,muzzy_decay_ms:-1"

ALLOCATORS = {
    "kept": "gact_graph's kept memory",
    "jemalloc-tuned": f"jemalloc, `{_TUNED}`",
    "jemalloc": "jemalloc, defaults",
    "glibc": "glibc",
}
"""The allocators' names, and their labels in tables."""

HEAP = ("MALLOC_MMAP_THRESHOLD_", str(4 << 20))
"""Set under a cap: tensors of 4 MB or more are then no part of glibc's heap.

There small objects that live until backward settle in the gaps of freed tensors, which serve no
other tensor from then on: part of the freed memory would count all the same, also of stock.
"""


def environment(allocator: str) -> dict[str, str]:
    """Return the environment of a process with this allocator.

    Raises:
        ExperimentError: jemalloc is not installed.
    """
    variables = {key: value for key, value in os.environ.items() if key != SWITCH}
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
