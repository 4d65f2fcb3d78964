"""Checks of a saved state: each error names the wrong entry.

All entries are checked before any of them is loaded, so that a state is loaded whole or not at all.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from gact_graph.adaptive.allocator import MEANS
from gact_graph.ops.quantize import WIDTHS

Check = Callable[[str, object], None]


def check_keys(
    path: str,
    state: object,
    keys: Iterable[str],
    optional: Iterable[str] = (),
    source: str = "gact_graph.state_dict",
) -> None:
    """Raise TypeError unless ``state`` is a mapping, and ValueError unless it has these keys only.

    Keys that are ``optional``, as states of some versions have them, may be missing. The
    ``source`` returns such a mapping.
    """
    if not isinstance(state, Mapping):
        raise TypeError(
            f"Expected {path} to be a mapping, as {source} returns it (got {type(state).__name__})"
        )
    expected = set(keys)
    missing, unknown = expected - set(state), set(state) - expected - set(optional)
    if missing or unknown:
        kinds = (("no", missing), ("also", unknown))
        got = " and ".join(
            f"{word} {', '.join(sorted(map(repr, names)))}" for word, names in kinds if names
        )
        raise ValueError(
            f"Expected {path} to have the keys {', '.join(sorted(map(repr, expected)))} "
            f"(got {got}); pass the result of {source}"
        )


def check_by_slot(path: str, entries: object, check: Check) -> None:
    """Raise TypeError or ValueError unless each slot is a str whose value passes the check."""
    if not isinstance(entries, Mapping):
        raise TypeError(
            f"Expected {path} to map names of slots to values (got {type(entries).__name__})"
        )
    for slot, value in entries.items():
        if not isinstance(slot, str):
            raise TypeError(f"Expected {path} to have str keys (got {slot!r})")
        check(f"{path}[{slot!r}]", value)


def check_names(path: str, value: object) -> None:
    """Raise TypeError unless ``value`` is a list of str."""
    if not isinstance(value, list) or not all(isinstance(name, str) for name in value):
        raise TypeError(f"Expected {path} to be a list of names (got {_got(value)})")


def check_count(path: str, value: object) -> None:
    """Raise TypeError or ValueError unless ``value`` is an int of at least 0."""
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"Expected {path} to be an int (got {_got(value)})")
    if value < 0:
        raise ValueError(f"Expected {path} to be 0 or more (got {value})")


def check_width(path: str, value: object) -> None:
    """Raise TypeError or ValueError unless ``value`` is one of the widths."""
    check_count(path, value)
    if value not in WIDTHS:
        raise ValueError(f"Expected {path} to be 1 to 16, or 32 (got {value})")


def check_mean_width(path: str, value: object) -> None:
    """Raise TypeError or ValueError unless ``value`` is a width, or a mean of widths."""
    check_measured(path, value)
    if value not in WIDTHS and value not in MEANS:
        raise ValueError(f"Expected {path} to be 1 to 16, or 32, in quarters below 8 (got {value})")


def check_flag(path: str, value: object) -> None:
    """Raise TypeError unless ``value`` is a bool."""
    if not isinstance(value, bool):
        raise TypeError(f"Expected {path} to be a bool (got {_got(value)})")


def check_measured(path: str, value: object) -> None:
    """Raise TypeError or ValueError unless ``value`` is a finite number of at least 0."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise TypeError(f"Expected {path} to be a number (got {_got(value)})")
    if not 0 <= value < math.inf:
        raise ValueError(f"Expected {path} to be finite and 0 or more (got {value})")


def _got(value: Any) -> str:
    return "None" if value is None else type(value).__name__
