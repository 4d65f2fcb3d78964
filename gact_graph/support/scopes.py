"""Values that hold inside a ``with`` statement, on each thread."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Generic, TypeVar

T = TypeVar("T")


class _Scope(Generic[T]):
    def __init__(self, value: T) -> None:
        self.value = value


class Scopes(threading.local, Generic[T]):
    """The value of the innermost scope on each thread.

    The generator of a context manager that a signal interrupted as it started or ended finishes
    with the traceback of the exception, after the scopes around it. Leaving a scope therefore
    leaves all scopes inside, and leaving it again does nothing; to restore an earlier value would
    bring back a scope that has ended.

    Args:
        default: The value outside of all scopes.
    """

    def __init__(self, default: T) -> None:
        self._default = default
        self._scopes: tuple[_Scope[T], ...] = ()

    @property
    def value(self) -> T:
        return self._scopes[-1].value if self._scopes else self._default

    @contextmanager
    def entered(self, value: T) -> Iterator[None]:
        """Set the value inside of the context."""
        scope, outer = _Scope(value), self._scopes
        self._scopes = (*outer, scope)
        try:
            yield
        finally:
            # Neither a call nor a loop, where Python would run the handler of a signal first.
            if scope in self._scopes:
                self._scopes = outer
