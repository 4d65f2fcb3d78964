"""Builds ``csrc/cpu`` at first use and loads it; tells why where that cannot be done."""

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
from gact_graph.support.progress import telling

# Floating-point contraction would round once where the other backends round twice.
# Without errno lrint is one instruction.
_FLAGS = ["-O3", "-std=c++17", "-ffp-contract=off", "-fno-math-errno"]
VECTOR_FLAGS: dict[str, tuple[str, ...]] = {
    "AVX512": ("-mavx512f", "-mavx512bw", "-mavx512dq", "-mavx512vl", "-mprefer-vector-width=512"),
    "AVX2": ("-mavx2", "-mf16c"),
    "DEFAULT": (),
}
"""By the name that torch gives to what the processor can do; others take the plain loops."""


@once
def load() -> Any | None:
    """The namespace of compiled operators, or None with one warning where there is no compiler."""
    try:
        library = build(_vector_flags())
    except Exception as error:  # whatever a toolchain may raise: the reference still serves
        fallback.warn("build its CPU kernels", "a C++ compiler (g++ or clang++)", error)
        return None
    memory_policy.use(library)
    return library


def operators_for(x: torch.Tensor) -> Any:
    """Where to call an operator on ``x``: ``torch.ops.gact_graph``, or what it would call.

    That has a Python function between two operators, which takes longer than a small tensor does.
    """
    plain = type(x) is torch.Tensor and x.is_cpu and not torch.compiler.is_compiling()
    found = load() if plain and not torch._C._len_torch_dispatch_stack() else None
    return found or torch.ops.gact_graph


@once
def build(vector_flags: tuple[str, ...]) -> Any:
    """Compiles the kernels with ``vector_flags``, or finds them in the cache, and loads them.

    A file's name in the cache holds a hash of every source, the flags, and the versions of torch
    and of the compiler, so that none is ever stale.

    Raises:
        FileNotFoundError: There is no compiler.
        RuntimeError: It failed.
        OSError: The library cannot be loaded.
    """
    flags = [*_FLAGS, *vector_flags]
    first, *others = commands()
    try:
        return _build(first, flags)
    except (OSError, RuntimeError) as error:
        if not others:
            raise
        fallback.warn_of_compiler(shlex.join(first), shlex.join(others[0]), error)
    return _build(others[0], flags)


def built(command: Sequence[str]) -> Path | None:
    """The library that this compiler has made for this processor, if it has; compiles nothing.

    Raises:
        OSError: The compiler does not start.
    """
    return cache.find(f"{_name(command, [*_FLAGS, *_vector_flags()])}.so")


def _vector_flags() -> tuple[str, ...]:
    return VECTOR_FLAGS.get(torch.backends.cpu.get_cpu_capability(), ())


def _build(command: Sequence[str], flags: Sequence[str]) -> Any:
    name = _name(command, flags)
    if not _load_from_cache(name):
        # Built in a folder of its own: processes do not wait for each other, and one that is killed
        # leaves no lock behind.
        place = cache.place_to_build()
        with tempfile.TemporaryDirectory(dir=place, prefix=cache.BUILD) as folder:
            sources = [path for path in files_of("cpu") if path.suffix == ".cpp"]
            defined = f"-DGACT_LIBRARY={name}"
            kept_in = "" if place is None else f", which are then kept in {place}"
            with telling(f"compiling kernels for the CPU{kept_in}"):
                library = compile_library(command, sources, [*flags, defined], Path(folder))
            kept = cache.keep(f"{name}.so", library.read_bytes())
            torch.ops.load_library(str(kept or library))
    return getattr(torch.ops, name)


def _load_from_cache(name: str) -> bool:
    path = cache.find(f"{name}.so")
    if path is None:
        return False
    try:
        torch.ops.load_library(str(path))
    except OSError:  # whole, and yet of no use here: linked for another machine
        cache.discard(path)
        return False
    return True


def _name(command: Sequence[str], flags: Sequence[str]) -> str:
    """What the library is called that this compiler makes with these flags."""
    how = [torch.__version__, str(torch.compiled_with_cxx11_abi())]
    how += [platform.machine(), platform.system(), shlex.join(command), version(command)]
    return f"gact_graph_cpu_{digest('cpu', [*how, *flags])}"
