"""What a layer that is computed again in backward need not compute once more.

A layer's edge work is its calls of ``propagate`` and ``edge_updater``. Where these run in blocks,
their own backward computes each block again. So when the layer as a whole is run again to make its
graph, a call may do less:

- If no gradient between its result and the layer's outputs needs the result's values (the layer
  adds a bias, say, or takes a view), the result's shape is enough.
- If its result was saved in forward, as small per-edge tensors such as attention weights are, it is
  known.

Calls are told apart by their number: the order in which the layer makes them.
"""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from torch import Tensor
from torch.autograd.graph import Node

from gact_graph.support.graph import ends_of, nodes_before, saved_by_node
from gact_graph.support.run_state import RunState

_local = threading.local()

Ends = Sequence[RunState | None]
"""Random states after each call; None for a call that did not run in blocks."""


@dataclass(frozen=True)
class Reuse:
    """What the call that starts now can take from the layer's first run.

    Attributes:
        in_blocks: Whether the call ran in blocks then; None if this is the first run.
        shape_only: Whether the result's shape is enough.
        result: The result, if it was saved.
    """

    in_blocks: bool | None
    shape_only: bool
    result: Tensor | None


@dataclass(frozen=True)
class _Result:
    tensor: Tensor
    version: int


class EdgeCalls:
    """The calls of a layer's edge work in one run of the layer.

    Args:
        ends: Those of the layer's first run; empty if this is the first.
        values_not_needed: Numbers of the calls whose result's shape is enough.
        shapes_only: Whether shapes are enough for all of them: for a run that is a try-out.
        edge_results: Results that were saved in the first run, by the number of their call.

    Attributes:
        ends: Those of this run.
        edge_results: Results of this run with a row for each edge, by the number of their call.
        saving: Whether a call in blocks saves its tensors now.
    """

    def __init__(
        self,
        ends: Ends = (),
        values_not_needed: frozenset[int] = frozenset(),
        shapes_only: bool = False,
        edge_results: Mapping[int, Tensor] | None = None,
    ) -> None:
        self.ends: list[RunState | None] = []
        self.edge_results: dict[int, Tensor] = {}
        self.saving = False
        self._first_ends = ends
        self._values_not_needed = values_not_needed
        self._shapes_only = shapes_only
        self._saved_results = edge_results or {}
        self._results: list[_Result | None] = []

    def next(self) -> Reuse:
        """For the call that starts now."""
        number, first = len(self.ends), self._first_ends
        known = number < len(first)
        return Reuse(
            first[number] is not None if known else None,
            self._shapes_only or (known and number in self._values_not_needed),
            self._saved_results.get(number),
        )

    @contextmanager
    def saves(self) -> Iterator[None]:
        """Within: a call in blocks saves its tensors."""
        self.saving = True
        try:
            yield
        finally:
            self.saving = False

    def ended_in_blocks(self, result: Tensor, of_edges: bool) -> None:
        """A call in blocks has ended.

        If it did not compute all, random states become what they were after it in the first run.

        Args:
            result: What it gave.
            of_edges: Whether that has a row for each edge, and the call left nothing else behind.
        """
        number, reuse = len(self.ends), self.next()
        end = self._first_ends[number] if number < len(self._first_ends) else None
        if end is not None and (reuse.shape_only or reuse.result is not None):
            end.restore_random_state()
        if of_edges:
            self.edge_results[number] = result
        self.ends.append(end or RunState(set()))  # nobody asks for those of a later run
        self._results.append(_Result(result, result._version))

    def ended_as_stock(self) -> None:
        """A call that ran as PyG has it has ended."""
        self.ends.append(None)
        self._results.append(None)

    def find_values_not_needed(self, outputs: Sequence[Tensor]) -> frozenset[int]:
        """The numbers of the calls whose values no node before the layer's outputs has saved."""
        consumers: dict[Node, list[Node]] = defaultdict(list)
        for node in nodes_before(ends_of(outputs)):
            for earlier, _ in node.next_functions:
                if earlier is not None:
                    consumers[earlier].append(node)
        return frozenset(
            number
            for number, result in enumerate(self._results)
            if result is not None
            and result.tensor.grad_fn is not None
            # A result that is changed in place must be memory of its own.
            and result.tensor._version == result.version
            and not _is_read(result.tensor.grad_fn, consumers)
        )


def current() -> EdgeCalls | None:
    """The calls of the layer that runs on this thread, or None."""
    return getattr(_local, "calls", None)


def ended_as_stock() -> None:
    """Edge work on this thread has ended that did not run in blocks."""
    calls = current()
    if calls is not None:
        calls.ended_as_stock()


@contextmanager
def counting(calls: EdgeCalls) -> Iterator[None]:
    """Within: edge work on this thread counts among ``calls``."""
    outer = current()
    _local.calls = calls
    try:
        yield
    finally:
        _local.calls = outer


def _is_read(source: Node, consumers: Mapping[Node, Sequence[Node]]) -> bool:
    """Whether a node that follows ``source`` in forward saved a tensor."""
    waiting, seen = [source], {source}
    while waiting:
        for node in consumers.get(waiting.pop(), ()):
            if node not in seen:
                if _saves(node):
                    return True
                seen.add(node)
                waiting.append(node)
    return False


def _saves(node: Node) -> bool:
    # A function written in Python may keep tensors anywhere.
    return hasattr(type(node), "saved_tensors") or bool(saved_by_node(node))
