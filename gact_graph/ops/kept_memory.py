"""Memory of large tensors on the CPU that is kept from one to the next.

torch returns a large tensor to the system when it is freed, and fetches the pages of the next one
anew, which takes a third to a half of a training step. From the first step of a wrapped model on,
tensors of 64 KiB or more take what earlier ones have left. What is kept for them and what is in use
never exceed together what was in use at some moment of this step or of the last, so that the
process peaks no higher. On CUDA, torch's own allocator does the same.
"""

from __future__ import annotations

from typing import Any

from gact_graph.support import heap

_library: Any = None


def start(library: Any) -> None:
    """The compiled operators are loaded: what needs them first is a training step."""
    global _library
    _library = library
    start_step()


def start_step() -> None:
    """A training step begins. Before the compiled operators are loaded, nothing happens."""
    if _library is not None:
        _library.start_keeping()


def end() -> None:
    """Returns what is kept to the system, and keeps nothing until the next step."""
    if _library is not None:
        _library.end_keeping()


heap.also_give_back(end)
