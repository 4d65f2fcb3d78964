"""Function and dispatch modes of others, which follow operations and may change their results."""

from __future__ import annotations

from gact_graph.support.torch_private import dispatch_modes, function_modes


def has_other_modes() -> bool:
    """Return whether modes of others follow the operation that runs, and may change its result.

    Inside of a trace, its functions are those that modes within it called: only modes around it,
    and those below autograd, see the operation after the trace. They are not active in backward.
    Those of torch, as of a default device and of counters, change no result.
    """
    return has_outer_mode() or any(map(_is_of_others, dispatch_modes()))


def has_outer_mode() -> bool:
    """Return whether function modes of others around the trace see the operation that runs."""
    return any(map(_is_of_others, function_modes()))


def _is_of_others(mode: object) -> bool:
    return not type(mode).__module__.startswith(_OBSERVING)


_OBSERVING = ("torch.", f"{__name__.partition('.')[0]}.")
"""The prefixes of modules whose modes change no result."""
