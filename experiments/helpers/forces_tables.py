"""The tables of ``results/forces.json``: each potential at each level."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from experiments.helpers.markdown import markdown_table
from experiments.helpers.table_sources import read, source

HEAD = ("", "", "peak, MB", "saved, MB", "s/step", "energy", "forces", "gradient")
"""The last three are relative errors beside stock."""

PHYSICS_HEAD = ("", "", "finite differences", "curl", "energy drift")

_NAMES = {"schnet": "SchNet", "dimenet++": "DimeNet++", "visnet": "ViSNet", "mace": "MACE-like"}


def forces(results: Path) -> str:
    """Memory, time and errors of each potential at each level."""
    found = read(results / "forces.json")
    return f"{markdown_table(HEAD, rows(found['models']))}\n\n{source(found)}"


def forces_physics(results: Path) -> str:
    """Finite differences, curl and energy drift of each potential at each level."""
    found = read(results / "forces.json")
    return f"{markdown_table(PHYSICS_HEAD, physics_rows(found['models']))}\n\n{source(found)}"


def rows(found: Mapping[str, Mapping[str, Any]]) -> list[tuple[str, ...]]:
    """Memory, time and errors, one row for each potential and level."""
    return [
        (
            *_head(name, way),
            f"{one['peak_bytes'] / 1e6:,.0f}",
            f"{one['saved_bytes'] / 1e6:,.0f}",
            f"{one['step_seconds']:.2f}",
            *(_error(one[key]) for key in ("energy_error", "forces_error", "gradient_error")),
        )
        for name, ways in found.items()
        for way, one in ways.items()
    ]


def physics_rows(found: Mapping[str, Mapping[str, Any]]) -> list[tuple[str, ...]]:
    """What forces obey whatever the net is, one row for each potential and level."""
    return [
        (*_head(name, way), *(f"{one[key]:.1e}" for key in ("difference_error", "curl", "drift")))
        for name, ways in found.items()
        for way, one in ways.items()
    ]


def _head(name: str, way: str) -> tuple[str, str]:
    level, _, bits = way.partition("-")
    said = level if level == "stock" else f"`{level}`"
    return _NAMES[name], f"{said} {bits} bit" if bits else said


def _error(value: float) -> str:
    return "0" if value == 0 else f"{value:.0e}"
