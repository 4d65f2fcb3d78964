"""A cache that drops the entries that the last forwards did not use."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Generic, Protocol, TypeVar

_IDLE_FORWARDS = 2
"""Forwards after which an unused entry is dropped: training and evaluation may alternate."""


class _Entry(Protocol):
    forward: int  # the last forward that used the entry


Entry = TypeVar("Entry", bound=_Entry)


class Recent(Generic[Entry]):
    """The entries that the last forwards used; a copy and a pickle of it are empty."""

    def __init__(self) -> None:
        self._forward = 0
        self._entries: dict[Hashable, Entry] = {}

    def next_forward(self) -> None:
        """Count a forward, and drop the entries that have not been used lately."""
        self._forward += 1
        since = self._forward - _IDLE_FORWARDS
        # A copy, as wherever entries are listed, because another thread may add one meanwhile.
        self._entries = {k: v for k, v in [*self._entries.items()] if v.forward >= since}

    def __getstate__(self) -> dict[str, object]:
        return vars(self) | {"_forward": 0, "_entries": {}}
