"""The pictures of the pages: those that are drawn, and dark twins of all light ones."""

from __future__ import annotations

import json
import re
from pathlib import Path

from experiments.helpers.errors import ResultsError
from experiments.helpers.parts import picture

# What a light picture is drawn in, and what takes its place on a dark page.
_DARK = {
    "#24292f": "#e6edf3",
    "#57606a": "#9ea7b3",
    "#8c959f": "#768390",
    "#d8dee4": "#3d444d",
    "#d55e00": "#ff8c3a",
    "#f6f8fa": "#21262d",
    "#dbeafe": "#1b2f4b",
    "#ffe8d6": "#4a2c14",
    "#dcf5e4": "#17361f",
}


def pictures(root: Path) -> dict[Path, str]:
    """Return each picture's text by its path: those from results/, and the dark ones."""
    folder = root / "docs" / "images"
    light = {path: path.read_text(encoding="utf-8") for path in sorted(folder.glob("*-light.svg"))}
    drawn: dict[Path, str] = {}
    partition = root / "results" / "partition" / "gat.json"
    if partition.exists():
        text = picture.draw(json.loads(partition.read_text(encoding="utf-8")))
        drawn[folder / "partition-light.svg"] = text
    light |= drawn
    dark = {
        path.with_name(path.name.replace("-light", "-dark")): _darkened(text)
        for path, text in light.items()
    }
    return drawn | dark


def _darkened(svg: str) -> str:
    """Exchange all colors.

    Raises:
        ResultsError: If the picture has a color without a dark one.
    """

    def dark(match: re.Match[str]) -> str:
        if match[0] not in _DARK:
            raise ResultsError(
                f"Expected pictures in the colors {', '.join(_DARK)} (got {match[0]})"
            )
        return _DARK[match[0]]

    return re.sub(r"#[0-9a-f]{6}\b", dark, svg)
