"""The pictures of the pages: those that are drawn, and dark twins of all light ones."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from experiments.helpers.errors import ResultsError
from experiments.helpers.parts import picture

_WIDTH, _HEIGHT = 760, 340
_LEFT, _RIGHT, _TOP, _BOTTOM = 56, 16, 58, 44

_SHOWN = {
    "stock": "stock PyG",
    "checkpoint": "torch's checkpoint",
    "L1+blocks": "gact_graph, 4 bit, in blocks",
}


_TEXT, _GRID = "#24292f", "#d8dee4"
_LINES = ("#24292f", "#8c959f", "#d55e00")  # of Okabe and Ito's colors, told apart by all eyes

# What a light picture is drawn in, and what takes its place on a dark page.
_DARK = {
    _TEXT: "#e6edf3",
    "#57606a": "#9ea7b3",
    "#8c959f": "#768390",
    _GRID: "#3d444d",
    "#d55e00": "#ff8c3a",
    "#f6f8fa": "#21262d",
    "#dbeafe": "#1b2f4b",
    "#ffe8d6": "#4a2c14",
    "#dcf5e4": "#17361f",
}


def pictures(root: Path) -> dict[Path, str]:
    """Return each picture's text by its path: those from results/, and the dark ones."""
    folder = root / "docs" / "images"
    memory = root / "results" / "memory" / "gat.json"
    step = folder / "step-light.svg"
    light = {path: path.read_text(encoding="utf-8") for path in sorted(folder.glob("*-light.svg"))}
    drawn = {step: _draw(json.loads(memory.read_text(encoding="utf-8")))}
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


def _draw(found: Mapping[str, Any]) -> str:
    variants = {name: found["variants"][name] for name in _SHOWN}
    most_time = max(time for v in variants.values() for time, _ in v["curve"])
    most_bytes = max(v["peak_bytes"] for v in variants.values())

    def x(time: float) -> float:
        return _LEFT + time / most_time * (_WIDTH - _LEFT - _RIGHT)

    def y(size: float) -> float:
        return _HEIGHT - _BOTTOM - size / most_bytes * (_HEIGHT - _TOP - _BOTTOM)

    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {_HEIGHT}" '
        f'font-family="system-ui, sans-serif" font-size="13" fill="{_TEXT}">',
        f"<title>{_title(variants)}</title>",
    ]
    for gigabytes in range(0, int(most_bytes / 1e9) + 1, 2):
        level = y(gigabytes * 1e9)
        parts += [
            f'<path d="M{_LEFT} {level:.1f}H{_WIDTH - _RIGHT}" stroke="{_GRID}"/>',
            f'<text x="{_LEFT - 8}" y="{level + 4:.1f}" text-anchor="end">{gigabytes} GB</text>',
        ]
    for seconds in range(0, int(most_time) + 1, 3):
        place = f'x="{x(seconds):.1f}" y="{_HEIGHT - _BOTTOM + 18}"'
        parts.append(f'<text {place} text-anchor="middle">{seconds} s</text>')
    caption = "memory over one training step, forward and backward"
    middle = (_LEFT + _WIDTH - _RIGHT) / 2
    parts.append(f'<text x="{middle}" y="{_HEIGHT - 6}" text-anchor="middle">{caption}</text>')
    start = _LEFT
    for color, (name, variant) in zip(_LINES, variants.items(), strict=True):
        points = [f"{x(t):.1f},{y(b):.1f}" for t, b in variant["curve"] if b is not None]
        parts += [
            f'<polyline points="{" ".join(points)}" fill="none" stroke="{color}" '
            f'stroke-width="{3 if name == "L1+blocks" else 1.8}" stroke-linejoin="round"/>',
            f'<path d="M{start} 15h22" stroke="{color}" stroke-width="4"/>',
            f'<text x="{start + 30}" y="19">{_SHOWN[name]}</text>',
            f'<text x="{start + 30}" y="37">peak {variant["peak_bytes"] / 1e9:.1f} GB, '
            f"{variant['step_seconds']:.1f} s a step</text>",
        ]
        start += 225
    return "\n".join([*parts, "</svg>"]) + "\n"


def _title(variants: Mapping[str, Any]) -> str:
    peaks = (f"{_SHOWN[n]} {v['peak_bytes'] / 1e9:.1f} GB" for n, v in variants.items())
    return f"Peak memory of one training step: {'; '.join(peaks)}"
