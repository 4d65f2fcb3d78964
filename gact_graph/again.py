"""What a layer that is computed again in backward needs not compute again.

Of the edge work that is done in blocks, backward computes each block once more by itself. Where
nothing that the layer does with the result reads its values for a gradient (it adds a bias, say, or
takes another view), only the result's shape is needed when the layer's graph is made anew. And what
edges have a few numbers of, attention say, may be saved in forward, and is then known.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

from torch import Tensor
from torch.autograd.graph import Node

from gact_graph.surroundings import Surroundings

_local = threading.local()


class Calls:
    """The edge work in blocks of one forward of one layer, call by call.

    Args:
        ends: Random states after each call, if this forward is one that is run again.
        unread: Numbers of the calls whose values are not needed.
        shapes_only: Whether none of them are: for a forward that is run for its graph alone.
        known: Results that were saved, by the number of their call.

    Attributes:
        of_edges: Results with a row for each edge, by the number of their call.
    """

    def __init__(
        self,
        ends: Sequence[Surroundings] = (),
        unread: frozenset[int] = frozenset(),
        shapes_only: bool = False,
        known: Mapping[int, Tensor] | None = None,
    ) -> None:
        self.of_edges: dict[int, Tensor] = {}
        self.ends: list[Surroundings] = []
        self.running = False
        self._before = ends
        self._unread = unread
        self._shapes_only = shapes_only
        self._known = known or {}
        self._results: list[tuple[Tensor, int]] = []  # and their versions

    @property
    def next_is_unread(self) -> bool:
        """Whether the call that starts now needs only the shape of its result."""
        number = len(self.ends)
        return self._shapes_only or (number in self._unread and number < len(self._before))

    @property
    def next_known(self) -> Tensor | None:
        """The result of the call that starts now, if it was saved."""
        return self._known.get(len(self.ends))

    @contextmanager
    def one(self) -> Iterator[None]:
        """A call runs and saves its tensors."""
        self.running = True
        try:
            yield
        finally:
            self.running = False

    def add(self, result: Tensor, of_edges: bool) -> None:
        """A call has ended. One that did not compute all leaves random states as if it had."""
        number = len(self.ends)
        if number in self._known or (self.next_is_unread and not self._shapes_only):
            self._before[number].restore_random_state()
        if of_edges:
            self.of_edges[number] = result
        self.ends.append(Surroundings(set()))
        self._results.append((result, result._version))

    def find_unread(self, outputs: Sequence[Tensor]) -> frozenset[int]:
        """The calls whose values nothing on the way to the layer's outputs reads for a gradient."""
        return frozenset(
            number
            for number, (result, version) in enumerate(self._results)
            # What is changed in place must be memory of its own.
            if result.grad_fn is not None
            and result._version == version
            and not _is_read(result.grad_fn, [o.grad_fn for o in outputs if o.grad_fn is not None])
        )


def current() -> Calls | None:
    """The calls of the layer that runs on this thread, or None."""
    return getattr(_local, "calls", None)


@contextmanager
def counting(calls: Calls) -> Iterator[None]:
    """What is done in blocks on this thread meanwhile counts among ``calls``."""
    outer = current()
    _local.calls = calls
    try:
        yield
    finally:
        _local.calls = outer


def _is_read(source: Node, outputs: Sequence[Node]) -> bool:
    """Whether a node between ``source`` and ``outputs`` saved a tensor."""
    seen: set[Node] = set()
    waiting = [*outputs]
    while waiting:
        node = waiting.pop()
        if node in seen or node is source:
            continue
        seen.add(node)
        waiting += [n for n, _ in node.next_functions if n is not None]
    downstream, grown = {source}, True
    while grown:
        found = {
            node
            for node in seen - downstream
            if any(following in downstream for following, _ in node.next_functions)
        }
        downstream |= found
        grown = bool(found)
    return any(_saves(node) for node in downstream - {source})


def _saves(node: Node) -> bool:
    # A function written in Python keeps what it likes.
    if hasattr(node, "saved_tensors"):
        return True
    # The raw ones: to look at the others would decode them.
    return any(name.startswith("_raw_saved_") for name in dir(node))
