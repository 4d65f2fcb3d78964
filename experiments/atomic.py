"""Files that are there whole or not at all, whenever the power goes."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

from experiments.errors import ResultsError


def write_atomically(path: Path, content: bytes) -> None:
    """Replace ``path`` by ``content`` in one move: a reader sees the old file or the new one.

    Raises:
        ResultsError: If the system refuses, a full disk for instance; the old file stays.
    """
    temporary: Path | None = None
    try:
        handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
        temporary = Path(name)
        with os.fdopen(handle, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        # mkstemp makes files for the owner alone; a result is no secret.
        temporary.chmod(0o644)
        os.replace(temporary, path)
    except OSError as error:
        raise ResultsError(f"Expected to be able to write {path} (got {error})") from None
    finally:
        # After the move there is nothing left under this name.
        if temporary is not None:
            temporary.unlink(missing_ok=True)
