"""The tables of ``results/peers`` and ``results/generality``, without the line on their origin."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from experiments.generality import HEAD, rows
from experiments.helpers import comparison
from experiments.helpers.markdown import markdown_table


def names(results: Path, folder: str) -> list[str]:
    """What the files in a folder of results are called."""
    return [path.stem for path in sorted((results / folder).glob("*.json"))]


def peers(found: Mapping[str, Any]) -> str:
    """All ways side by side, and who wins what."""
    variants = found["variants"]
    table = markdown_table(comparison.head(variants), comparison.rows(variants))
    return "\n\n".join(
        (table, " ".join([*comparison.verdicts(variants), *comparison.not_run(variants)]))
    )


def generality(found: Mapping[str, Any]) -> str:
    """One network of another field, at each width."""
    return markdown_table(HEAD, rows(found["runs"]))
