"""The CPU allocators under which a training step can run, as environments of its process."""

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
"""Their names, and what tables call them."""


def environment(allocator: str) -> dict[str, str]:
    """Return the environment of a process that allocates so.

    Raises:
        ExperimentError: jemalloc is asked for and is not installed.
    """
    found = {key: value for key, value in os.environ.items() if key != SWITCH}
    if allocator == "kept":
        return found
    found[SWITCH] = "0"
    if allocator != "glibc":
        library = ctypes.util.find_library("jemalloc")
        if library is None:
            raise ExperimentError(
                "Expected jemalloc's shared library (got none); apt-get install libjemalloc2"
            )
        found["LD_PRELOAD"] = library
    if allocator == "jemalloc-tuned":
        found["MALLOC_CONF"] = _TUNED
    return found
