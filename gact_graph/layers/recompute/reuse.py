"""Edge work that need not be computed once more when a layer runs again in backward.

The edge work of a layer is its calls of ``propagate`` and ``edge_updater``. In blocks, their own
backward computes each block again. So while the layer runs again, a call computes less:

- After the last tensor that the layer's backward reads, the shape of a result is enough.
- A result that was saved in forward, such as small attention weights, is decoded.

A call is known by its number: the order in which the layer makes its calls.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from torch import Tensor

from gact_graph.support.run_state import RunState

_local = threading.local()


@dataclass(frozen=True)
class Reuse:
    """The parts of the first run that a call can reuse.

    Attributes:
        in_blocks: Whether the call ran in blocks then; None in the first run itself.
        shape_only: Whether the result's shape is enough.
        result: The result, if it was saved.
    """

    in_blocks: bool | None
    shape_only: bool
    result: Tensor | None


@dataclass(frozen=True)
class End:
    """The end of a call in the first run.

    Attributes:
        random: The random states; None for a call that did not run in blocks.
        saved: The number of tensors that the layer had saved.
    """

    random: RunState | None
    saved: int


class EdgeCalls:
    """The calls of a layer's edge work in one run of the layer.

    Attributes:
        saving: Whether a call in blocks saves its tensors now.
    """

    saving = False

    @contextmanager
    def saves(self) -> Iterator[None]:
        """Mark the tensors that are saved inside as those of a call in blocks."""
        self.saving = True
        try:
            yield
        finally:
            self.saving = False

    def next(self) -> Reuse:
        """Return what the call that starts now can reuse."""
        raise NotImplementedError

    def ended_in_blocks(self, result: Tensor, of_edges: bool) -> None:
        """Count a call in blocks.

        Args:
            result: The result.
            of_edges: Whether it has a row for each edge, and the call left nothing else behind.
        """
        raise NotImplementedError

    def ended_as_stock(self) -> None:
        """Count a call that ran as in PyG."""
        raise NotImplementedError


def current() -> EdgeCalls | None:
    """Return the calls of the layer that runs on this thread, or None."""
    return getattr(_local, "calls", None)


def ended_as_stock() -> None:
    """Count edge work on this thread that did not run in blocks."""
    calls = current()
    if calls is not None:
        calls.ended_as_stock()


@contextmanager
def counting(calls: EdgeCalls) -> Iterator[None]:
    """Count edge work on this thread among ``calls``."""
    outer = current()
    _local.calls = calls
    try:
        yield
    finally:
        _local.calls = outer
