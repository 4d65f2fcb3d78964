"""Compiles C++ sources against torch to a shared library, with nothing but a compiler."""

from __future__ import annotations

import os
import platform
import shlex
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path

import torch

_TORCH = Path(torch.__file__).resolve().parent
_NAMES = ("c++", "g++", "clang++")

# Lines of the compiler's output that an error quotes.
_QUOTED = 20


def commands() -> list[list[str]]:
    """The compilers to try: ``CXX``, which may have options, then the first of c++, g++, clang++.

    Raises:
        FileNotFoundError: There is none.
    """
    given = shlex.split(os.environ.get("CXX", ""))
    found = next(([name] for name in _NAMES if shutil.which(name)), [])
    if not given and not found:
        raise FileNotFoundError(
            f"Expected a C++ compiler on PATH (found none of: {', '.join(_NAMES)})"
        )
    return [words for words in (given, found) if words]


def version(command: Sequence[str]) -> str:
    """The first line that a compiler says of itself.

    Raises:
        FileNotFoundError: It is not there, and ``CXX`` names it.
        OSError: It does not start.
    """
    if not shutil.which(command[0]):
        raise FileNotFoundError(f"Expected CXX to name a C++ compiler on PATH (got {command[0]!r})")
    words = [*command, "--version"]
    said = subprocess.run(words, stdin=subprocess.DEVNULL, capture_output=True, text=True)
    return said.stdout.partition("\n")[0]


def compile_library(
    command: Sequence[str], sources: Sequence[Path], flags: Sequence[str], folder: Path
) -> Path:
    """The library of the sources, each compiled by a process of its own, at once.

    Args:
        command: The compiler.
        sources: Files whose names differ.
        flags: For each of them, and for the linker.
        folder: An empty one for what is made.

    Raises:
        OSError: The compiler does not start.
        RuntimeError: It failed; with the end of what it said.
    """
    compiler = [*command, *flags, "-fPIC", *_openmp()]
    includes = _TORCH / "include"
    compiler += [f"-I{includes}", f"-I{includes / 'torch' / 'csrc' / 'api' / 'include'}"]
    compiler.append(f"-D_GLIBCXX_USE_CXX11_ABI={int(torch.compiled_with_cxx11_abi())}")
    objects = [folder / f"{source.stem}.o" for source in sources]
    _run_all(
        [
            [*compiler, "-c", str(source), "-o", str(result)]
            for source, result in zip(sources, objects, strict=True)
        ]
    )
    library = folder / "library.so"
    # The process that loads the library has loaded torch's own ones already.
    libraries = [f"-L{_TORCH / 'lib'}", "-lc10", "-ltorch_cpu", "-ltorch"]
    if platform.system() == "Darwin":
        libraries += ["-undefined", "dynamic_lookup"]
    link = [*compiler, "-shared", *map(str, objects), *libraries, "-o", str(library)]
    _run_all([link])
    return library


def _openmp() -> list[str]:
    # torch's parallel_for is a header: without OpenMP it runs on one thread. Apple's clang has
    # none.
    return [] if platform.system() == "Darwin" else ["-fopenmp"]


def _run_all(commands: Sequence[Sequence[str]]) -> None:
    running: list[subprocess.Popen[bytes]] = []
    with tempfile.TemporaryFile() as output:
        try:
            for words in commands:
                running.append(
                    subprocess.Popen(
                        words, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT
                    )
                )
            codes = [process.wait() for process in running]
        finally:  # also where the user interrupts
            for process in running:
                if process.poll() is None:
                    process.kill()
                    process.wait()
        if any(codes):
            output.seek(0)
            said = output.read().decode(errors="replace").splitlines()[-_QUOTED:]
            failed = shlex.join(commands[next(i for i, code in enumerate(codes) if code)])
            raise RuntimeError("\n".join([f"{_cause(said)} from `{failed}`", *said]))


def _cause(said: Sequence[str]) -> str:
    """The first line that tells of an error."""
    return next((line for line in said if "error" in line), "the compiler failed")
