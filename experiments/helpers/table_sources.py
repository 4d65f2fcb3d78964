"""The files behind tables, and the caption that names command, commit, versions and machine."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from experiments.helpers.errors import ResultsError

_COMMIT = re.compile(r", commit ([0-9a-f]{7,40}(?:\+changes)?)[,.]")


def read(path: Path) -> Any:
    """Return the content of one file of results."""
    return json.loads(path.read_text(encoding="utf-8"))


def check_commits(name: str, table: str) -> None:
    """Check that the numbers of a table stem from one commit, or that each row names its own.

    Raises:
        ResultsError: If the captions name several commits and the column ``commit`` does not.
    """
    commits = set(_COMMIT.findall(table))
    if len(commits) < 2:
        return
    head, _, *rows = (line for line in table.splitlines() if line.startswith("|"))
    columns = [cell.strip() for cell in head.strip("|").split("|")]
    shown: set[str] = set()
    if "commit" in columns:
        place = columns.index("commit")
        for row in rows:
            shown |= {*row.strip("|").split("|")[place].replace(",", " ").split()}
    if shown != commits:
        raise ResultsError(
            f"Expected the numbers of table {name} to stem from one commit, or each row to name "
            f"its own in a column commit (got {', '.join(sorted(commits))})"
        )


def source(found: Mapping[str, Any], what: str = "") -> str:
    """Name the command, the commit, the versions and the machine of one file's numbers."""
    said = f"`{found['command']}`; {_circumstances(found)}."
    return f"<small>{what}: {said}</small>" if what else f"<small>{said}</small>"


def sources(files: Iterable[Mapping[str, Any]]) -> str:
    """Name every command, grouped by commit, versions and machine."""
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
        f"commit {found['commit']}",
        f"torch {versions['torch'].partition('+')[0]}",
        f"PyG {versions['torch_geometric']}",
        found["machine"],
    ]
    if threads:
        parts.append("1 thread" if threads == 1 else f"{threads} threads")
    return ", ".join(parts)
