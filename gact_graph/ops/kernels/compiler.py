"""Compilation of C++ sources against torch to a shared library, with only a compiler."""

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

# The last lines of the compiler's output that an error quotes.
_QUOTED = 20


def commands() -> list[list[str]]:
    """Return the compilers to try: ``CXX`` with its options, then the first of c++, g++, clang++.

    Raises:
        FileNotFoundError: If there is none.
    """
    chosen = shlex.split(os.environ.get("CXX", ""))
    default = next(([name] for name in _NAMES if shutil.which(name)), [])
    if not chosen and not default:
        raise FileNotFoundError(
            f"Expected a C++ compiler on PATH (found none of: {', '.join(_NAMES)})"
        )
    return [command for command in (chosen, default) if command]


def version(command: Sequence[str]) -> str:
    """Return the first line of a compiler's ``--version``.

    Raises:
        FileNotFoundError: If ``CXX`` names a compiler that is not on PATH.
        OSError: If the compiler does not start.
    """
    if not shutil.which(command[0]):
        raise FileNotFoundError(f"Expected CXX to name a C++ compiler on PATH (got {command[0]!r})")
    words = [*command, "--version"]
    process = subprocess.run(words, stdin=subprocess.DEVNULL, capture_output=True, text=True)
    return process.stdout.partition("\n")[0]


def compile_library(
    command: Sequence[str], sources: Sequence[Path], flags: Sequence[str], folder: Path
) -> Path:
    """Compile sources in parallel processes and link them to a library.

    Args:
        command: The compiler.
        sources: Files of one folder.
        flags: Options of the compiler and the linker.
        folder: An empty folder for the output.

    Raises:
        OSError: If the compiler does not start.
        RuntimeError: If the compiler fails; the message quotes its last lines.
    """
    compiler = [*command, *flags, "-fPIC", "-fvisibility=hidden", f"-I{_TORCH / 'include'}"]
    objects = [folder / f"{source.stem}.o" for source in sources]
    _run_all(
        [
            [*compiler, "-c", str(source), "-o", str(result)]
            for source, result in zip(sources, objects, strict=True)
        ]
    )
    library = folder / f"{sources[0].parent.name}.so"
    # The process that loads the library has already loaded torch's libraries.
    libraries = [f"-L{_TORCH / 'lib'}", "-lc10", "-ltorch_cpu"]
    if platform.system() == "Darwin":
        libraries += ["-undefined", "dynamic_lookup"]
    link = [*compiler, "-shared", *map(str, objects), *libraries, "-o", str(library)]
    _run_all([link])
    return library


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
        finally:  # also after an interrupt
            for process in running:
                if process.poll() is None:
                    process.kill()
                    process.wait()
        if any(codes):
            output.seek(0)
            lines = output.read().decode(errors="replace").splitlines()[-_QUOTED:]
            failed = shlex.join(commands[next(i for i, code in enumerate(codes) if code)])
            raise RuntimeError("\n".join([f"{_cause(lines)} from `{failed}`", *lines]))


def _cause(lines: Sequence[str]) -> str:
    """Return the first line with an error."""
    return next((line for line in lines if "error" in line), "the compiler failed")
