"""The files behind tables, and the line under each table that names the command and the machine."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any


def read(path: Path) -> Any:
    """The content of one file of results."""
    return json.loads(path.read_text(encoding="utf-8"))


def source(found: Mapping[str, Any], what: str = "") -> str:
    """Name the command, the versions and the machine of one file's numbers."""
    said = f"`{found['command']}`; {_circumstances(found)}."
    return f"<small>{what}: {said}</small>" if what else f"<small>{said}</small>"


def sources(files: Iterable[Mapping[str, Any]]) -> str:
    """Name every command, grouped by versions and machine."""
    commands: dict[str, dict[str, None]] = {}
    for found in files:
        commands.setdefault(_circumstances(found), {})[f"`{found['command']}`"] = None
    return "\n\n".join(
        f"<small>{'<br>'.join(group)}<br>{circumstances}.</small>"
        for circumstances, group in commands.items()
    )


def _circumstances(found: Mapping[str, Any]) -> str:
    versions = found["versions"]
    threads = found["threads"] if "threads" in found else found.get("config", {}).get("threads")
    parts = [
        f"gact_graph {versions['gact_graph']}",
        f"torch {versions['torch'].partition('+')[0]}",
        f"PyG {versions['torch_geometric']}",
        found["machine"],
    ]
    if threads:
        parts.append("1 thread" if threads == 1 else f"{threads} threads")
    return ", ".join(parts)
