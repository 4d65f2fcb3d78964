"""Builds a folder of ``csrc`` at first use, and finds the libraries of earlier builds."""

from __future__ import annotations

import platform
import shlex
import tempfile
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path

import torch

from gact_graph.ops.kernels import cache, notices
from gact_graph.ops.kernels.compiler import commands, compile_library, version
from gact_graph.ops.kernels.sources import digest, files_of
from gact_graph.support.progress import progress


def build(part: str, flags: Sequence[str], *, quiet: bool = False) -> None:
    """Compile a part, or find it in the cache, and load it.

    The name of a file in the cache holds a hash of every source, the flags, and the versions of
    torch and of the compiler, so a stale file is never loaded.

    Args:
        part: The folder of ``csrc``.
        flags: Options of the compiler and the linker.
        quiet: Whether to omit warnings and the report of a slow build.

    Raises:
        FileNotFoundError: If there is no compiler.
        RuntimeError: If the compiler fails.
        OSError: If the library cannot be loaded.
    """
    first, *others = commands()
    try:
        _build(part, first, flags, quiet)
    except (OSError, RuntimeError) as error:
        if not others:
            raise
        if not quiet:
            notices.warn_of_compiler(shlex.join(first), shlex.join(others[0]), error)
        _build(part, others[0], flags, quiet)


def built(part: str, command: Sequence[str], flags: Sequence[str]) -> Path | None:
    """Return the library that a compiler has built, or None; compile nothing.

    Raises:
        OSError: If the compiler does not start.
    """
    return cache.find(f"{_name(part, command, flags)}.so")


def _build(part: str, command: Sequence[str], flags: Sequence[str], quiet: bool) -> None:
    name = _name(part, command, flags)
    if _load_from_cache(name):
        return
    # In a new folder, so that processes need no lock, which a killed one would leave behind.
    place = cache.place_to_build()
    with tempfile.TemporaryDirectory(dir=place, prefix=cache.BUILD) as folder:
        sources = [path for path in files_of(part) if path.suffix == ".cpp"]
        kept_in = "" if place is None else f", which are then kept in {place}"
        report = progress(f"compiling kernels for the CPU{kept_in}")
        with nullcontext() if quiet else report:
            library = compile_library(command, sources, flags, Path(folder))
        cached = cache.keep(f"{name}.so", library.read_bytes(), quiet=quiet)
        torch.ops.load_library(str(cached or library))


def _load_from_cache(name: str) -> bool:
    path = cache.find(f"{name}.so")
    if path is None:
        return False
    try:
        torch.ops.load_library(str(path))
    except OSError:  # complete, but linked for another machine
        cache.discard(path)
        return False
    return True


def _name(part: str, command: Sequence[str], flags: Sequence[str]) -> str:
    """Return the name of the library that a compiler builds with these flags."""
    how = [torch.__version__, platform.machine(), platform.system()]
    how += [shlex.join(command), version(command)]
    return f"gact_graph_{part}_{digest(part, [*how, *flags])}"
