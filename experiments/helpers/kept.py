"""What an earlier run of a command left, for the command to go on from."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from experiments.helpers.errors import ResultsError


def read_kept(path: Path, settings: Mapping[str, Any]) -> dict[str, Any] | None:
    """The content of a file of results; None where there is none.

    Args:
        path: The file, a JSON object.
        settings: What the object must have: another command's numbers are no part of this one's.

    Raises:
        ResultsError: If it is of other settings.
    """
    if not path.exists():
        return None
    content: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    differing = [name for name, value in settings.items() if content.get(name) != value]
    if differing:
        raise ResultsError(
            f"Expected {path} to be of the same settings (got another {', '.join(differing)}): "
            "give another --out"
        )
    return content
