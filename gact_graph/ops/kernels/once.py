"""A cache of a function's results that runs the function once, even with concurrent calls."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from typing import Any, Generic, TypeVar

R = TypeVar("R")


class once(Generic[R]):
    """Cache results as :func:`functools.cache`, but let concurrent threads wait for the first.

    With ``functools.cache``, both would run the function, and torch refuses to load a library
    twice. Exceptions are not cached: the next call runs the function again.
    """

    def __init__(self, function: Callable[..., R]) -> None:
        self.__doc__ = function.__doc__
        self.__wrapped__ = function
        self._results: dict[tuple[Any, ...], R] = {}
        self._renew()
        if hasattr(os, "register_at_fork"):
            # A forked child would wait forever for a lock that another thread of its parent holds.
            os.register_at_fork(after_in_child=self._renew)

    def __call__(self, *args: Any) -> R:
        try:
            return self._results[args]
        except KeyError:
            pass
        with self._lock:
            if args not in self._results:
                self._results[args] = self.__wrapped__(*args)
            return self._results[args]

    def clear(self) -> None:
        """Discard all results."""
        self._results.clear()

    def __len__(self) -> int:
        """Return the number of cached results."""
        return len(self._results)

    def _renew(self) -> None:
        self._lock = threading.RLock()
