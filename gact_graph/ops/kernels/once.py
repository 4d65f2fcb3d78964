"""A function whose results are kept, and which threads that come at once do not run twice."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from typing import Any, Generic, TypeVar

R = TypeVar("R")


class once(Generic[R]):
    """As :func:`functools.cache`, but a second thread waits for the first one's result.

    With ``functools.cache`` both would run the function: two builds of one library, of which torch
    refuses the second. An exception is not kept; the next call tries again.
    """

    def __init__(self, function: Callable[..., R]) -> None:
        self.__doc__ = function.__doc__
        self.__wrapped__ = function
        self._found: dict[tuple[Any, ...], R] = {}
        self._renew()
        if hasattr(os, "register_at_fork"):
            # A child of a process whose other thread holds the lock would wait for ever.
            os.register_at_fork(after_in_child=self._renew)

    def __call__(self, *args: Any) -> R:
        try:
            return self._found[args]
        except KeyError:
            pass
        with self._lock:
            if args not in self._found:
                self._found[args] = self.__wrapped__(*args)
            return self._found[args]

    def clear(self) -> None:
        """Forgets all results."""
        self._found.clear()

    def __len__(self) -> int:
        """How many results are kept."""
        return len(self._found)

    def _renew(self) -> None:
        self._lock = threading.RLock()
