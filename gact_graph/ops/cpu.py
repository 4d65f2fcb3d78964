"""Build ``csrc/cpu`` at first use and load it; warn with the reason if that fails.

The library registers its kernels with the operators of :data:`NAMESPACE` on the CPU.
"""

from __future__ import annotations

import platform
import shlex
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from gact_graph.ops.kernels import cache, fallback
from gact_graph.ops.kernels.compiler import commands, compile_library, version
from gact_graph.ops.kernels.once import once
from gact_graph.ops.kernels.sources import digest, files_of
from gact_graph.support.memory.policy import memory_policy
from gact_graph.support.progress import log_if_slow

NAMESPACE = "gact_graph"
"""The namespace of the operators, ``torch.ops.gact_graph``."""

# Floating-point contraction would round once where the other backends round twice.
# Without errno lrint is one instruction.
_FLAGS = ["-O3", "-std=c++17", "-ffp-contract=off", "-fno-math-errno"]
VECTOR_FLAGS: dict[str, tuple[str, ...]] = {
    "AVX512": ("-mavx512f", "-mavx512bw", "-mavx512dq", "-mavx512vl", "-mprefer-vector-width=512"),
    "AVX2": ("-mavx2", "-mf16c"),
    "DEFAULT": (),
}
"""The compiler's flags for each CPU capability of torch. Other capabilities take plain loops."""


@once
def load() -> Any | None:
    """Load the kernels; return ``torch.ops.gact_graph``, or None with one warning on failure."""
    try:
        library = build(_vector_flags())
    except Exception as error:  # of any type that a toolchain raises: use the reference
        fallback.warn("build its CPU kernels", "a C++ compiler (g++ or clang++)", error)
        return None
    memory_policy.use(library)
    return library


@once
def build(vector_flags: tuple[str, ...], namespace: str = NAMESPACE) -> Any:
    """Compile the kernels, or find them in the cache, and load them.

    The name of a file in the cache holds a hash of every source, the flags, and the versions of
    torch and of the compiler, so a stale file is never loaded.

    Args:
        vector_flags: A value of :data:`VECTOR_FLAGS`.
        namespace: The namespace of the operators that the kernels are registered with.

    Returns:
        ``torch.ops``'s namespace.

    Raises:
        FileNotFoundError: If there is no compiler.
        RuntimeError: If the compiler fails.
        OSError: If the library cannot be loaded.
    """
    flags = _flags(vector_flags, namespace)
    first, *others = commands()
    try:
        _build(first, flags)
    except (OSError, RuntimeError) as error:
        if not others:
            raise
        fallback.warn_of_compiler(shlex.join(first), shlex.join(others[0]), error)
        _build(others[0], flags)
    return getattr(torch.ops, namespace)


def built(command: Sequence[str]) -> Path | None:
    """Return the library that a compiler has built for this processor, or None; compile nothing.

    Raises:
        OSError: If the compiler does not start.
    """
    return cache.find(f"{_name(command, _flags(_vector_flags()))}.so")


def _flags(vector_flags: Sequence[str], namespace: str = NAMESPACE) -> list[str]:
    return [*_FLAGS, *vector_flags, f"-DGACT_LIBRARY={namespace}"]


def _vector_flags() -> tuple[str, ...]:
    return VECTOR_FLAGS.get(torch.backends.cpu.get_cpu_capability(), ())


def _build(command: Sequence[str], flags: Sequence[str]) -> None:
    name = _name(command, flags)
    if _load_from_cache(name):
        return
    # In a new folder, so that processes need no lock, which a killed one would leave behind.
    place = cache.place_to_build()
    with tempfile.TemporaryDirectory(dir=place, prefix=cache.BUILD) as folder:
        sources = [path for path in files_of("cpu") if path.suffix == ".cpp"]
        kept_in = "" if place is None else f", which are then kept in {place}"
        with log_if_slow(f"compiling kernels for the CPU{kept_in}"):
            library = compile_library(command, sources, flags, Path(folder))
        cached = cache.keep(f"{name}.so", library.read_bytes())
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


def _name(command: Sequence[str], flags: Sequence[str]) -> str:
    """Return the name of the library that a compiler builds with these flags."""
    how = [torch.__version__, str(torch.compiled_with_cxx11_abi())]
    how += [platform.machine(), platform.system(), shlex.join(command), version(command)]
    return f"gact_graph_cpu_{digest('cpu', [*how, *flags])}"
