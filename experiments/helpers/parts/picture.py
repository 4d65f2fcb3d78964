"""The picture of ``python -m experiments.partition``: peak and sent bytes by number of parts."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from experiments.helpers.parts.counting import modelled

_WIDTH, _HEIGHT = 760, 320
_TOP, _BOTTOM, _LEFT, _PANEL = 76, 48, 62, 300
_TEXT, _GRID = "#24292f", "#d8dee4"
_LINES = ("#8c959f", "#d55e00")

Points = Sequence[tuple[int, float]]


def draw(found: Mapping[str, Any]) -> str:
    """Two panels: the peak of a process, measured; what one sends in a step, measured and counted.

    Args:
        found: What the command wrote, with two ways and two widths of the halo.
    """
    ways = list(dict.fromkeys(run["way"] for run in found["runs"]))[: len(_LINES)]
    peaks = {way: _measured(found, "peak_bytes", way, 32) for way in ways}
    sent, counted = {}, {}
    for bits in found["halo_bits"][: len(_LINES)]:
        name = f"halo in {bits} bits"
        sent[name] = [p for p in _measured(found, "sent_bytes", ways[-1], bits) if p[0] > 1]
        counted[name] = [*sent[name][-1:], *_counted(found, ways[-1], bits)]
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {_HEIGHT}" '
        f'font-family="system-ui, sans-serif" font-size="13" fill="{_TEXT}">',
        f"<title>{_title(peaks, sent)}</title>",
        *_panel(_LEFT, "peak of a process, MB", peaks, {}),
        *_panel(_LEFT + _PANEL + 84, "sent by a process in a step, MB", sent, counted),
        f'<text x="{_WIDTH - 16}" y="{_TOP - 6}" text-anchor="end" font-size="11">dashed: counted, '
        "not run</text>",
    ]
    return "\n".join([*parts, "</svg>"]) + "\n"


def _measured(found: Mapping[str, Any], name: str, way: str, bits: int) -> Points:
    """By number of processes, the largest value of one."""
    return [
        (run["parts"], max(rank[name] for rank in run["ranks"]) / 1e6)
        for run in found["runs"]
        if run["way"] == way and (run["halo_bits"] == bits or run["parts"] == 1)
    ]


def _counted(found: Mapping[str, Any], way: str, bits: int) -> Points:
    runs = [r for r in found["runs"] if r["way"] == way and r["halo_bits"] == bits]
    several = [run for run in runs if run["parts"] > 1]
    if not several:
        return []
    ranks = max(several, key=lambda run: run["parts"])["ranks"]
    sizes = found["counted"]
    return [(size["parts"], modelled(size, ranks, None).sent_bytes / 1e6) for size in sizes]


def _panel(
    left: int, caption: str, lines: Mapping[str, Points], dashed: Mapping[str, Points]
) -> list[str]:
    points = [point for line in (*lines.values(), *dashed.values()) for point in line]
    fewest = math.log2(min(parts for parts, _ in points))
    most = max(math.log2(max(parts for parts, _ in points)), fewest + 1)
    step = _step(max(value for _, value in points))
    top = step * math.ceil(max(value for _, value in points) / step)

    def place(point: tuple[int, float]) -> str:
        x = left + (math.log2(point[0]) - fewest) / (most - fewest) * _PANEL
        return f"{x:.1f},{_HEIGHT - _BOTTOM - point[1] / top * (_HEIGHT - _TOP - _BOTTOM):.1f}"

    found = [f'<text x="{left}" y="20" font-weight="600">{caption}</text>']
    for number in range(round(top / step) + 1):
        _, y = place((1, number * step)).split(",")
        found += [
            f'<path d="M{left} {y}h{_PANEL}" stroke="{_GRID}"/>',
            f'<text x="{left - 8}" y="{float(y) + 4:.1f}" text-anchor="end">'
            f"{number * step:,g}</text>",
        ]
    for parts in sorted({parts for parts, _ in points}):
        x, _ = place((parts, 0)).split(",")
        found.append(f'<text x="{x}" y="{_HEIGHT - 28}" text-anchor="middle">{parts}</text>')
    middle = left + _PANEL / 2
    found.append(f'<text x="{middle}" y="{_HEIGHT - 8}" text-anchor="middle">processes</text>')
    for number, (color, (name, line)) in enumerate(zip(_LINES, lines.items(), strict=False)):
        start = left + 150 * number
        found += [
            f'<path d="M{start} 38h18" stroke="{color}" stroke-width="4"/>',
            f'<text x="{start + 24}" y="42">{name}</text>',
            _line(line, place, color, ""),
        ]
        if dashed.get(name):
            found.append(_line(dashed[name], place, color, ' stroke-dasharray="5 4"'))
    return found


def _line(line: Points, place: Any, color: str, dash: str) -> str:
    points = " ".join(place(point) for point in line)
    return f'<polyline points="{points}" fill="none" stroke="{color}" stroke-width="2.4"{dash}/>'


def _step(most: float) -> float:
    """A round distance of grid lines: three to seven of them."""
    power = 10.0 ** math.floor(math.log10(most))
    return next(power * share for share in (0.2, 0.5, 1.0, 2.0) if most / (power * share) <= 6)


def _title(peaks: Mapping[str, Points], sent: Mapping[str, Points]) -> str:
    told = [
        *(
            f"{way} peaks at {line[-1][1]:,.0f} MB in {line[-1][0]} processes"
            for way, line in peaks.items()
        ),
        *(
            f"{name}: {line[-1][1]:,.1f} MB sent in a step by each of {line[-1][0]} processes"
            for name, line in sent.items()
            if line
        ),
    ]
    return "; ".join(told)
