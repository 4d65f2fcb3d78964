"""Files that are there whole or not at all, whenever the power goes."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

from experiments.helpers.errors import ResultsError

_PART = ".part"


def remove_leftovers(folder: Path) -> None:
    """Remove what processes that were killed inside :func:`write_atomically` left in a folder.

    Only where nobody else writes at the same time.
    """
    for part in folder.glob(f".*{_PART}"):
        part.unlink(missing_ok=True)


def probe(folder: Path, size: int) -> None:
    """Write a file of ``size`` bytes into a folder, down to the disk, and remove it.

    Raises:
        OSError: If the system refuses any of it.
    """
    handle, name = tempfile.mkstemp(dir=folder, prefix=".probe.", suffix=_PART)
    try:
        _fill(handle, bytes(size))
    finally:
        Path(name).unlink(missing_ok=True)


def _fill(handle: int, content: bytes) -> None:
    with os.fdopen(handle, "wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


def write_atomically(path: Path, content: bytes) -> None:
    """Replace ``path`` by ``content`` in one move: a reader sees the old file or the new one.

    Raises:
        ResultsError: If the system refuses, a full disk for instance; the old file stays.
    """
    temporary: Path | None = None
    try:
        handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.", suffix=_PART)
        temporary = Path(name)
        _fill(handle, content)
        # mkstemp makes files for the owner alone; a result is no secret.
        temporary.chmod(0o644)
        os.replace(temporary, path)
    except OSError as error:
        raise ResultsError(f"Expected to be able to write {path} (got {error})") from error
    finally:
        # After the move there is nothing left under this name.
        if temporary is not None:
            temporary.unlink(missing_ok=True)
