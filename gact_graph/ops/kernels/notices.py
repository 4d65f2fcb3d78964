"""Warnings about kernels that cannot be built or cached."""

from __future__ import annotations

from pathlib import Path

from gact_graph.support.messages import warn as warn_user


def warn(failed: str, remedy: str, error: Exception, *others: str) -> None:
    """Warn that kernels are missing, with the remedy, the cause and other causes."""
    causes = "; ".join([_cause(error), *others])
    warn_user(
        f"gact_graph could not {failed} and works with slower pure-torch code. "
        f"Install {remedy}; `python -m gact_graph.info` lists what is there ({causes})."
    )


def warn_of_compiler(failed: str, taken: str, error: Exception) -> None:
    """Warn that the compiler in ``CXX`` fails and another compiler is used."""
    warn_user(
        f"gact_graph could not build its CPU kernels with CXX={failed!r} and takes {taken!r} "
        f"instead. Set CXX to a C++ compiler, or unset it ({_cause(error)})."
    )


def warn_of_prebuilt(error: OSError) -> None:
    """Warn that a library of the wheel does not load, and that a build serves instead."""
    warn_user(
        "gact_graph built its CPU kernels, because those of its wheel do not load. Install a wheel "
        f"for this torch; `python -m gact_graph.info` lists what is there ({error})."
    )


def _cause(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__


def warn_of_no_cache(place: Path | None, error: OSError) -> None:
    """Warn that kernels cannot be cached and are compiled in each process."""
    warn_user(
        f"gact_graph cannot keep its compiled kernels in {place or '~/.cache/gact_graph'} and "
        "compiles them anew in each process. Set TORCH_EXTENSIONS_DIR to a folder that you alone "
        f"may write to ({type(error).__name__}: {error})."
    )
