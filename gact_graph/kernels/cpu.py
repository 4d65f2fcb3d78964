"""Builds ``csrc/cpu`` at first use and loads it; tells why where that cannot be done."""

from __future__ import annotations

import functools
import hashlib
import os
import platform
import shutil
import tempfile
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from gact_graph.kernels import cache, fallback

_CSRC = Path(__file__).resolve().parent.parent / "csrc"
_HEADERS = ("noise.h", "cpu/lanes.h", "cpu/memory.h")
_SOURCES = ("cpu/quantize.cpp", "cpu/bitmask.cpp", "cpu/weighted.cpp")

# Floating-point contraction would round once where the other backends round twice.
# Without errno lrint is one instruction.
_FLAGS = ["-O3", "-std=c++17", "-ffp-contract=off", "-fno-math-errno"]
VECTOR_FLAGS: dict[str, tuple[str, ...]] = {
    "AVX512": ("-mavx512f", "-mavx512bw", "-mavx512dq", "-mavx512vl", "-mprefer-vector-width=512"),
    "AVX2": ("-mavx2", "-mf16c"),
    "DEFAULT": (),
}
"""By the name that torch gives to what the processor can do; others take the plain loops."""


@functools.cache
def load() -> Any | None:
    """The namespace of compiled operators, or None with one warning where there is no compiler."""
    try:
        return build(VECTOR_FLAGS.get(torch.backends.cpu.get_cpu_capability(), ()))
    except Exception as error:  # whatever a toolchain may raise: the reference still serves
        fallback.warn("build its CPU kernels", "a C++ compiler (g++ or clang++) and ninja", error)
        return None


@functools.cache
def build(vector_flags: tuple[str, ...]) -> Any:
    """Compiles the kernels with ``vector_flags``, or finds them in the cache, and loads them.

    The cache is a folder of ``TORCH_EXTENSIONS_DIR`` or of the user's cache, and a file's name
    holds a hash of the sources, the flags and the torch version, so that none is ever stale.
    """
    flags = [*_FLAGS, *vector_flags]
    name = f"gact_graph_cpu_{_digest(flags)}"
    path = cache.folder() / f"{name}.so"
    if path.exists():
        torch.ops.load_library(str(path))
    else:
        _compile_and_load(name, flags, path)
    return getattr(torch.ops, name)


def _compile_and_load(name: str, flags: list[str], path: Path) -> None:
    cpp_extension = _cpp_extension()
    path.parent.mkdir(parents=True, exist_ok=True)
    # Built in a folder of its own and moved at the end: a build that was killed leaves neither a
    # lock nor half a library, and two processes do not wait for each other.
    with tempfile.TemporaryDirectory(dir=path.parent, prefix="build-") as folder:
        cpp_extension.load(
            name,
            [str(_CSRC / source) for source in _SOURCES],
            extra_cflags=[*flags, f"-DGACT_LIBRARY={name}", *_openmp()],
            build_directory=folder,
            is_python_module=False,
        )
        shutil.copy2(Path(folder) / f"{name}.so", Path(folder) / "done")
        os.replace(Path(folder) / "done", path)


def _cpp_extension() -> ModuleType:
    # Slow to import and needless where the library is in the cache already.
    from torch.utils import cpp_extension

    return cpp_extension


def _openmp() -> list[str]:
    # torch's parallel_for is a header: without OpenMP it runs on one thread. Apple's clang has
    # none.
    return [] if platform.system() == "Darwin" else ["-fopenmp"]


def _digest(flags: list[str]) -> str:
    text = [torch.__version__, platform.machine(), platform.system(), os.environ.get("CXX", "")]
    parts = [*text, *flags, *((_CSRC / source).read_text() for source in (*_HEADERS, *_SOURCES))]
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:16]
