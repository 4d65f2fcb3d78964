"""The memory of one step, from one saved tensor to the next."""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable
from typing import NamedTuple

from gact_graph.codecs import Context
from gact_graph.support.rows import Row, numbered


class Moment(NamedTuple):
    """The part of a step that ends when a context is saved or released.

    Attributes:
        slot: The slot of the context, with a number if a step saves several; empty at the end.
        released: Whether the context is released, in backward.
        peak: The peak of the part in bytes.
    """

    slot: str
    released: bool
    peak: int


class Moments:
    """Record the peak of each part of a step.

    Args:
        mark: Returns the peak in bytes since it was called last.

    Attributes:
        moments: The parts, in the order in which they end.
        rows: The rows of the contexts that hold memory, by the slots of :attr:`moments`.
        sources: The contexts from which each context is computed again, likewise.
    """

    def __init__(self, mark: Callable[[], int]) -> None:
        self.moments: list[Moment] = []
        self.rows: dict[str, Row] = {}
        self.sources: dict[str, list[str]] = {}
        self._saved: weakref.WeakKeyDictionary[Context, str] = weakref.WeakKeyDictionary()
        self._mark = mark
        self._closed = False
        self._names: Counter[str] = Counter()

    def saved(self, slot: str, context: Context) -> str:
        """Record that a context was saved, and later that it is released; return its name."""
        name = numbered(self._names, slot, " ")
        sources = (self._saved.get(source.context) for source in context.sample.sources)
        self.sources[name] = [*filter(None, sources)]
        self._saved[context] = name
        self._end(name, False)
        weakref.finalize(context, self._end, name, True).atexit = False
        return name

    def close(self) -> None:
        """End the last part, at the end of the step. Contexts that remain are not followed."""
        self._end("", True)
        self._closed = True

    def _end(self, name: str, released: bool) -> None:
        if not self._closed:
            self.moments.append(Moment(name, released, self._mark()))
