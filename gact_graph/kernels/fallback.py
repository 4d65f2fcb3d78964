"""What is said where kernels cannot be had."""

from __future__ import annotations

import warnings


def warn(failed: str, remedy: str, error: Exception) -> None:
    """One RuntimeWarning: what could not be done, what to install, and the cause."""
    lines = str(error).strip().splitlines()
    cause = f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__
    warnings.warn(
        f"gact_graph could not {failed} and quantizes with slower pure-torch code. "
        f"Install {remedy}, and see `python -m gact_graph.info` for the cause ({cause}).",
        RuntimeWarning,
        stacklevel=3,
    )
