"""The pictures of the pages: those that are drawn, and dark twins of all light ones."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from experiments.helpers.errors import ResultsError
from experiments.helpers.network_model import modelled

# Colors of light pictures, and their twins on a dark page.
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

_WIDTH, _HEIGHT = 760, 320
_TOP, _BOTTOM, _LEFT, _PANEL = 76, 48, 62, 300
_TEXT, _GRID = "#24292f", "#d8dee4"
_COLORS = ("#8c959f", "#d55e00")

Points = Sequence[tuple[int, float]]


def pictures(root: Path) -> dict[Path, str]:
    """Return each picture's text by its path: those from results/, and the dark ones."""
    folder = root / "docs" / "images"
    light = {path: path.read_text(encoding="utf-8") for path in sorted(folder.glob("*-light.svg"))}
    drawn: dict[Path, str] = {}
    partition = root / "results" / "partition" / "gat.json"
    if partition.exists():
        content = json.loads(partition.read_text(encoding="utf-8"))
        drawn[folder / "partition-light.svg"] = draw_partition(content)
    dark = {
        path.with_name(path.name.replace("-light", "-dark")): _darkened(text)
        for path, text in (light | drawn).items()
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


def draw_partition(content: Mapping[str, Any]) -> str:
    """Draw the results of ``experiments.partition`` with two ways and two widths of the halo.

    Two panels: the peak of a process, measured; the bytes that a process sends in a step, measured
    and counted.
    """
    ways = list(dict.fromkeys(run["way"] for run in content["runs"]))[: len(_COLORS)]
    peaks = {way: _measured(content, "peak_bytes", way, 32) for way in ways}
    sent, counted = {}, {}
    for bits in content["halo_bits"][: len(_COLORS)]:
        name = f"halo in {bits} bits"
        sent[name] = [p for p in _measured(content, "sent_bytes", ways[-1], bits) if p[0] > 1]
        counted[name] = [*sent[name][-1:], *_counted(content, ways[-1], bits)]
    title = [
        f"{way} peaks at {line[-1][1]:,.0f} MB in {line[-1][0]} processes"
        for way, line in peaks.items()
    ]
    title += [
        f"{name}: {line[-1][1]:,.1f} MB sent in a step by each of {line[-1][0]} processes"
        for name, line in sent.items()
        if line
    ]
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {_HEIGHT}" '
        f'font-family="system-ui, sans-serif" font-size="13" fill="{_TEXT}">',
        f"<title>{'; '.join(title)}</title>",
        *_panel(_LEFT, "peak of a process, MB", peaks, {}),
        *_panel(_LEFT + _PANEL + 84, "sent by a process in a step, MB", sent, counted),
        f'<text x="{_WIDTH - 16}" y="{_TOP - 6}" text-anchor="end" font-size="11">dashed: counted, '
        "not run</text>",
    ]
    return "\n".join([*parts, "</svg>"]) + "\n"


def _measured(content: Mapping[str, Any], name: str, way: str, bits: int) -> Points:
    """By number of processes, the largest value of a process."""
    return [
        (run["parts"], max(rank[name] for rank in run["ranks"]) / 1e6)
        for run in content["runs"]
        if run["way"] == way and (run["halo_bits"] == bits or run["parts"] == 1)
    ]


def _counted(content: Mapping[str, Any], way: str, bits: int) -> Points:
    runs = [r for r in content["runs"] if (r["way"], r["halo_bits"]) == (way, bits)]
    several = [run for run in runs if run["parts"] > 1]
    if not several:
        return []
    ranks = max(several, key=lambda run: run["parts"])["ranks"]
    sizes = content["counted"]
    return [(size["parts"], modelled(size, ranks, None).sent_bytes / 1e6) for size in sizes]


def _panel(
    left: int, caption: str, lines: Mapping[str, Points], dashed: Mapping[str, Points]
) -> list[str]:
    points = [point for line in (*lines.values(), *dashed.values()) for point in line]
    fewest = math.log2(min(parts for parts, _ in points))
    most = max(math.log2(max(parts for parts, _ in points)), fewest + 1)
    largest = max(value for _, value in points)
    power = 10.0 ** math.floor(math.log10(largest))
    # A round distance of grid lines: three to seven of them.
    step = next(power * s for s in (0.2, 0.5, 1.0, 2.0) if largest / (power * s) <= 6)
    top = step * math.ceil(largest / step)

    def x(parts: int) -> str:
        return f"{left + (math.log2(parts) - fewest) / (most - fewest) * _PANEL:.1f}"

    def y(value: float, below: int = 0) -> str:
        return f"{_HEIGHT - _BOTTOM - value / top * (_HEIGHT - _TOP - _BOTTOM) + below:.1f}"

    def path(line: Points, color: str, dash: str = "") -> str:
        points = " ".join(f"{x(parts)},{y(value)}" for parts, value in line)
        look = f'fill="none" stroke="{color}" stroke-width="2.4"{dash}'
        return f'<polyline points="{points}" {look}/>'

    svg = [f'<text x="{left}" y="20" font-weight="600">{caption}</text>']
    for number in range(round(top / step) + 1):
        value = number * step
        svg.append(f'<path d="M{left} {y(value)}h{_PANEL}" stroke="{_GRID}"/>')
        place = f'x="{left - 8}" y="{y(value, 4)}" text-anchor="end"'
        svg.append(f"<text {place}>{value:,g}</text>")
    for parts in sorted({parts for parts, _ in points}):
        place = f'x="{x(parts)}" y="{_HEIGHT - 28}" text-anchor="middle"'
        svg.append(f"<text {place}>{parts}</text>")
    place = f'x="{left + _PANEL / 2}" y="{_HEIGHT - 8}" text-anchor="middle"'
    svg.append(f"<text {place}>processes</text>")
    for number, (color, (name, line)) in enumerate(zip(_COLORS, lines.items(), strict=False)):
        start = left + 150 * number
        svg.append(f'<path d="M{start} 38h18" stroke="{color}" stroke-width="4"/>')
        svg.append(f'<text x="{start + 24}" y="42">{name}</text>')
        svg.append(path(line, color))
        if dashed.get(name):
            svg.append(path(dashed[name], color, ' stroke-dasharray="5 4"'))
    return svg
