"""Libraries that a wheel brings along, which need no compiler."""

from __future__ import annotations

from pathlib import Path

import torch

FOLDER = Path(__file__).resolve().parent / "libraries"
"""The libraries of a wheel; a source tree has none."""


def find(name: str) -> Path:
    """Return the library of a name.

    Raises:
        FileNotFoundError: If the package does not have it; the message names those that it has.
    """
    path = FOLDER / f"{name}.so"
    if path.is_file():
        return path
    others = ", ".join(sorted(other.stem for other in FOLDER.glob("*.so")))
    raise FileNotFoundError(
        f"this installation has no prebuilt {name} (it has {others or 'no prebuilt library'})"
    )


def load(name: str) -> Path:
    """Load the library of a name, and return its path.

    Raises:
        FileNotFoundError: If the package does not have it.
        OSError: If it does not load, as with a torch that lacks one of its functions.
    """
    path = find(name)
    try:
        torch.ops.load_library(str(path))
    except OSError as error:
        cause = str(error.__cause__ or error).splitlines()[0]
        raise OSError(f"{name} does not load with torch {torch.__version__}: {cause}") from error
    return path
