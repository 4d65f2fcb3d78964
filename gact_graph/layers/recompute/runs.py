"""The two runs of a layer, with the pack hooks that number the tensors that autograd saves.

The edge work of a layer is its calls of ``propagate`` and ``edge_updater``, known by their order.
In blocks, their own backward computes each block again. So while the layer runs again, a call
computes less:

- After the last tensor that the layer's backward reads, the shape of a result is enough.
- A result that was saved in forward, such as small attention weights, is decoded.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from gact_graph.codecs import Saved
from gact_graph.layers.recompute.contexts import Waiting, geometry, kept
from gact_graph.support.current import Capture
from gact_graph.support.run_state import RunState
from gact_graph.support.scopes import Scopes
from gact_graph.support.storage import is_plain, key_of, parts_of, plain_of, version_of

_runs: Scopes[Run | None] = Scopes(None)


@dataclass(frozen=True)
class Reuse:
    """The parts of the first run that a call of edge work can reuse.

    Attributes:
        in_blocks: Whether the call ran in blocks then; None in the first run itself.
        shape_only: Whether the result's shape is enough.
        result: The result, if it was saved.
    """

    in_blocks: bool | None = None
    shape_only: bool = False
    result: Tensor | None = None


@dataclass(frozen=True)
class End:
    """The end of a call of edge work in the first run.

    Attributes:
        random: The random states; None for a call that did not run in blocks.
        saved: The number of tensors that the layer had saved.
    """

    random: RunState | None
    saved: int


class Run:
    """A run of a layer.

    Attributes:
        saving: Whether a call in blocks saves its tensors now.
    """

    saving: bool = False

    def __init__(self) -> None:
        self._count = 0  # of the tensors that the layer has saved

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
        return Reuse()

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


def current() -> Run | None:
    """Return the run of the layer that runs on this thread, or None."""
    return _runs.value


def ended_as_stock() -> None:
    """Count edge work on this thread that did not run in blocks."""
    run = current()
    if run is not None:
        run.ended_as_stock()


def counting(run: Run) -> AbstractContextManager[None]:
    """Count edge work on this thread in ``run``."""
    return _runs.entered(run)


class FirstRun(Run):
    """The run of a layer in forward.

    Args:
        stand_for: A function that returns the placeholder of the tensor with a number.
        session: The session that compresses what the layer saves.
        named: The names of these tensors in the report.
        owned: The tensors of the layer itself, which are saved by reference.

    Attributes:
        forward_runs: Whether it runs; read by :func:`gact_graph.support.current.forward_runs`.
        most: The most bytes of a result of edge work that is saved.
        ends: The end of each call of edge work.
    """

    forward_runs: bool = True
    most: float = 0.0

    def __init__(
        self,
        stand_for: Callable[[int, Tensor], Saved],
        session: Capture,
        named: dict[str, Tensor],
        owned: Iterator[Tensor],
    ) -> None:
        super().__init__()
        self.ends: list[End] = []
        self._results: dict[int, tuple[Tensor, int]] = {}
        self._stand_for, self._session, self._named = stand_for, session, named
        self._owned = {key_of(p): version_of(p) for tensor in owned for p in parts_of(tensor)}
        self._known: dict[Any, tuple[Saved, Any]] = {}

    @torch.no_grad()
    def save(self, tensor: Tensor) -> Saved:
        """Save a tensor for the run in backward; if the layer saves it, by the same codes."""
        saved = self._session.pack(tensor)
        tensor = plain_of(tensor)
        if is_plain(tensor):
            self._known[key_of(tensor)] = saved, geometry(tensor)
        return saved

    def pack(self, tensor: Tensor) -> Saved:
        """The pack hook."""
        number, tensor = self._count, plain_of(tensor)
        self._count += 1
        if is_plain(tensor):
            key = key_of(tensor)
            saved, known = self._known.get(key, (None, None))
            if saved is not None and known == geometry(tensor):
                return saved
            # A buffer that the layer has changed changes again when the layer runs in backward.
            if key in self._owned and self._owned[key] == version_of(tensor):
                return kept(tensor)
        return self._stand_for(number, tensor)

    def saved_results(self) -> dict[int, Saved]:
        """Save the results of edge work after which the layer saves tensors, by their calls."""
        results: dict[int, Saved] = {}
        for number, (result, version) in self._results.items():
            if self.ends[number].saved < self._count and result._version == version:
                self._named[f"edges.{len(results)}"] = result
                results[number] = self.save(result)
        return results

    def end(self) -> None:
        """Release all tensors: autograd holds the pack hook for as long as the graph."""
        self.forward_runs = False
        self._known.clear()
        self._results.clear()
        del self._session, self._named

    def ended_in_blocks(self, result: Tensor, of_edges: bool) -> None:
        if of_edges and result.is_floating_point() and result.nbytes <= self.most:
            self._results[len(self.ends)] = result, result._version
        self.ends.append(End(RunState(set()), self._count))

    def ended_as_stock(self) -> None:
        self.ends.append(End(None, self._count))


class Enough(BaseException):
    """Ends a run that has saved all tensors that are wanted.

    Not an Exception, so that the layer does not catch it.
    """


class RunAgain(Run):
    """The run of a layer in backward.

    Args:
        wanted: The shapes and dtypes of the tensors that are wanted, by their numbers.
        ends: The ends of the calls of edge work in the first run.
        results: The results that were saved, by the number of their call.
        waiting: Encodes the tensors.

    Attributes:
        tensors: The tensors, by their numbers.
    """

    def __init__(
        self,
        wanted: Mapping[int, Any],
        ends: Sequence[End],
        results: Mapping[int, Tensor],
        waiting: Waiting,
    ) -> None:
        super().__init__()
        self.tensors: dict[int, Saved] = {}
        self._wanted, self._ends, self._results = wanted, ends, results
        self._last = max(wanted)
        self._waiting = waiting
        self._calls = 0

    @property
    def complete(self) -> bool:
        """Whether all tensors that are wanted have been saved."""
        return len(self.tensors) == len(self._wanted)

    def pack(self, tensor: Tensor) -> Saved:
        """The pack hook."""
        number, tensor = self._count, plain_of(tensor)
        self._count += 1
        if is_plain(tensor):  # detach() would turn an EdgeIndex into a plain tensor
            tensor = tensor.detach()
        if number not in self._wanted or self._wanted[number] != kind_of(tensor):
            return kept(tensor)
        self.tensors[number] = self._waiting.pack(tensor, self.saving)
        if number == self._last:
            raise Enough
        return self.tensors[number]

    def next(self) -> Reuse:
        if self._calls >= len(self._ends):
            return super().next()
        end, result = self._ends[self._calls], self._results.get(self._calls)
        return Reuse(end.random is not None, self._last < end.saved, result)

    def ended_in_blocks(self, result: Tensor, of_edges: bool) -> None:
        if self._calls in self._results:  # it has drawn no random numbers
            random = self._ends[self._calls].random
            assert random is not None
            random.restore_random_state()
        self._calls += 1

    def ended_as_stock(self) -> None:
        self._calls += 1


def kind_of(tensor: Tensor) -> tuple[Any, ...]:
    """Return the shape and dtype of a tensor, which do not differ between the runs."""
    return tensor.shape, tensor.dtype
