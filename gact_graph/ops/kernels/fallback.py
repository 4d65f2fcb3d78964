"""What is said where kernels cannot be had, or not be kept."""

from __future__ import annotations

from pathlib import Path

from gact_graph.support.warn import warn as warn_user


def warn(failed: str, remedy: str, error: Exception) -> None:
    """One RuntimeWarning: what could not be done, what to install, and the cause."""
    lines = str(error).strip().splitlines()
    cause = f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__
    warn_user(
        f"gact_graph could not {failed} and works with slower pure-torch code. "
        f"Install {remedy}, and see `python -m gact_graph.info` for the cause ({cause})."
    )


def warn_of_no_cache(place: Path | None, error: OSError) -> None:
    """One RuntimeWarning: kernels are compiled anew in each process."""
    warn_user(
        f"gact_graph cannot keep its compiled kernels in {place or '~/.cache/gact_graph'} and "
        "compiles them anew in each process. Set TORCH_EXTENSIONS_DIR to a folder that you alone "
        f"may write to ({type(error).__name__}: {error})."
    )
