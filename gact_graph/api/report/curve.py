"""What autograd holds while a step runs, as a figure of plotly.js: a plain dict.

Colors are names of the page's style variables, so that they follow its theme.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import Any

from gact_graph.api.report.data import ReportData
from gact_graph.api.report.layers import label_of, layer_of
from gact_graph.api.report.markup import escape, wrapped
from gact_graph.api.report.names import shorten
from gact_graph.api.report.units import format_bytes, unit_for
from gact_graph.support.rows import Row

_TICK = 14  # characters


def curve(report: ReportData) -> dict[str, Any]:
    """What autograd holds while a step runs: forward adds the contexts, backward frees them.

    A point is a stretch of contexts that one layer saves. A storage that several share counts with
    the first, which is the last that backward frees; so backward is forward, seen in a mirror.
    """
    stretches = [[*rows] for _, rows in groupby(report.contexts, lambda row: layer_of(row.slot))]
    names = [layer_of(rows[0].slot) for rows in stretches]
    curves = [
        (report.baseline, "stock", [row.raw_bytes for row in report.contexts]),
        ("now", "now", [row.stored_bytes for row in report.contexts]),
    ]
    if report.host_bytes:
        left = [row.stored_bytes - row.host_bytes for row in report.contexts]
        curves.append(("now, on the device", "now-device", left))
    unit, size = unit_for(max(report.raw_bytes, report.stored_bytes))
    count = len(stretches)
    hovers = [f"forward, after {wrapped(label_of(name))}" for name in names]
    hovers += [f"backward, after {wrapped(label_of(name))}" for name in reversed(names)]
    traces = []
    for name, color, taken in curves:
        held = [*_sums(stretches, taken)]
        # Backward starts from the peak, and ends with nothing.
        values = [0, *held, *held[-2::-1], 0]
        traces.append(
            {
                "type": "scatter",
                "mode": "lines",
                "name": name,
                "x": [*range(2 * count + 1)],
                "y": [value / size for value in values],
                "text": ["at the start", *hovers],
                "customdata": [format_bytes(value) for value in values],
                "hovertemplate": f"%{{text}}<br><b>{name}: %{{customdata}}</b><extra></extra>",
                "line": {"color": f"--{color}", "width": 2.5},
                "fill": "tozeroy",
                "fillcolor": f"--{color}-fill",
            }
        )
    return {
        "data": traces,
        "layout": {
            "xaxis": {"range": [0, 2 * count], "zeroline": False, "showgrid": False},
            "yaxis": {"title": {"text": unit}, "rangemode": "tozero", "automargin": True},
            "legend": {"orientation": "h", "x": 0, "y": -0.1, "yanchor": "top"},
            "margin": {"l": 50, "r": 30, "t": 28, "b": 64},
            "shapes": [_middle(count)],
            "annotations": [
                _direction("forward →", count, "right"),
                _direction("backward →", count, "left"),
            ],
        },
        "ticks": _ticks(names),
    }


def _sums(stretches: Sequence[Sequence[Row]], taken: Sequence[int]) -> Iterator[int]:
    """What is held after each stretch."""
    held, place = 0, 0
    for rows in stretches:
        held += sum(taken[place : place + len(rows)])
        place += len(rows)
        yield held


def _ticks(names: Sequence[str]) -> list[tuple[float, str]]:
    """The places and names of layers in forward: the numbered ones if there are any.

    Of layers with one number that follow each other, as ``convs.1`` and ``norms.1``, it is the
    first.
    """
    numbers = [re.sub(r".*?(\d*)$", r"\1", name) for name in names]
    found, last = [], ""
    for place, (name, number) in enumerate(zip(names, numbers, strict=True)):
        if number != last if number else not any(numbers):
            found.append((place + 0.5, escape(shorten(label_of(name), _TICK))))
            last = number
    return found


def _middle(place: int) -> dict[str, Any]:
    ends = {"x0": place, "x1": place, "y0": 0, "y1": 1, "yref": "paper"}
    return {"type": "line", **ends, "line": {"color": "--line", "width": 1, "dash": "dot"}}


def _direction(text: str, place: int, anchor: str) -> dict[str, Any]:
    corner = {"x": place, "xanchor": anchor, "y": 1, "yref": "paper", "yanchor": "bottom"}
    shift = -6 if anchor == "right" else 6
    font = {"color": "--faint", "size": 12}
    return {"text": text, **corner, "xshift": shift, "showarrow": False, "font": font}
