"""The location of the kernels' sources, and the hash of the files that a compiler reads."""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Iterable
from pathlib import Path

_SOURCES = ("*.h", "*.cpp", "*.cu")


@functools.cache
def csrc() -> Path:
    """Return the folder ``csrc``: inside the package of a wheel, or beside it in a source tree.

    Raises:
        FileNotFoundError: If it is in neither place.
    """
    package = Path(__file__).resolve().parents[2]
    places = (package / "csrc", package.parent / "csrc")
    for place in places:
        if (place / "noise.h").is_file():
            return place
    raise FileNotFoundError(f"Expected the sources of the kernels in {places[0]} or {places[1]}")


def files_of(backend: str) -> list[Path]:
    """Return every file that a compiler may read for a backend, in a stable order."""
    folders = (csrc(), csrc() / backend)
    return sorted(path for folder in folders for kind in _SOURCES for path in folder.glob(kind))


def digest(backend: str, how: Iterable[str]) -> str:
    """Return a hash of the sources and of everything else that the compiled code depends on.

    Args:
        backend: ``cpu``, ``cuda`` or ``allocator``.
        how: Options, versions and the machine.
    """
    mark = hashlib.sha256()
    for text in (*how, *(part for path in files_of(backend) for part in _named(path))):
        mark.update(text.encode() + b"\0")
    return mark.hexdigest()[:16]


def _named(path: Path) -> tuple[str, str]:
    return str(path.relative_to(csrc())), path.read_text()
