"""The library of ``csrc/allocator``: freed memory that is kept, and a watch of allocations.

It needs classes of torch outside the stable ABI, so it serves the torch that it was built with
alone. It is optional: operators need it for no result. A wheel's library serves one torch; for
another one it is built in the background at first use, if there is a compiler.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

from gact_graph.ops.kernels import compiler, library, prebuilt
from gact_graph.ops.kernels.once import once
from gact_graph.support.memory.limits import has_limit
from gact_graph.support.memory.policy import memory_policy

FLAGS = ["-O3", "-std=c++20", "-DGACT_LIBRARY=gact_graph"]
"""The compiler's options; the headers of torch 2.14 are in C++20."""


@once
def load() -> Any | None:
    """Load the library; return ``torch.ops.gact_graph``, or None if there is none."""
    try:
        prebuilt.load(prebuilt_name())
    except OSError:
        try:
            library.build("allocator", FLAGS, quiet=True)
        except Exception:  # of any type that a toolchain raises: nothing depends on it
            return None
    memory_policy.use(torch.ops.gact_graph)
    return torch.ops.gact_graph


def load_soon() -> None:
    """Load the library, or compile it on another thread, which training does not wait for."""
    if _is_there():
        load()
    elif not has_limit():  # under which freed memory is not kept, and a thread may not start
        with suppress(RuntimeError):  # no more threads: no memory is kept
            threading.Thread(target=load, name="gact_graph allocator").start()


def _is_there() -> bool:
    """Return whether the wheel or the cache has the library."""
    try:
        prebuilt.find(prebuilt_name())
        return True
    except FileNotFoundError:
        pass
    try:
        return built(compiler.commands()[0]) is not None
    except OSError:  # no compiler
        return False


def built(command: Sequence[str]) -> Path | None:
    """Return the library that a compiler has built, or None; compile nothing.

    Raises:
        OSError: If the compiler does not start.
    """
    return library.built("allocator", command, FLAGS)


def prebuilt_name() -> str:
    """Return the name of a wheel's library for this torch, as in ``allocator-torch2.13``."""
    return "allocator-torch" + ".".join(torch.__version__.split(".")[:2])
