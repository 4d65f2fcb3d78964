"""Figures of the report: two by plotly.js, as plain dicts, and one by matplotlib.

Colors of the plain dicts are the names of the page's style variables, so that the figures follow
the theme of the page.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from gact_graph.api.report.contexts import Contexts, Layer, by_layer
from gact_graph.api.report.curves import curves_of, layers_in_order
from gact_graph.api.report.names import format_bytes, label_of, shorten, unit_for, wrap
from gact_graph.api.report.table import SHOWN

if TYPE_CHECKING:
    from gact_graph.api.report.report import Report

_TICK, _LABEL = 14, 20
"""Characters of a name below the axis, and in an area."""

_MANY = 16
"""With more layers than this, layers of one kind, as ``convs.0`` and ``convs.1``, share an area,
and contexts are shown after a layer is selected."""


def curve(report: Report) -> dict[str, Any]:
    """Draw the bytes that autograd holds during a step."""
    names = [name for name, _ in layers_in_order(report)]
    unit, size = unit_for(max(report.raw_bytes, report.stored_bytes))
    middle = len(names)
    hovers = [f"forward, after {wrap(label_of(name))}" for name in names]
    hovers += [f"backward, after {wrap(label_of(name))}" for name in reversed(names)]
    traces = []
    for shown in curves_of(report):
        name, held = shown.name, [count for _, count in shown.points]
        traces.append(
            {
                "type": "scatter",
                "mode": "lines",
                "name": name,
                "x": [*range(2 * middle + 1)],
                "y": [count / size for count in held],
                "text": ["at the start", *hovers],
                "customdata": [format_bytes(count) for count in held],
                "hovertemplate": f"%{{text}}<br><b>{name}: %{{customdata}}</b><extra></extra>",
                "line": {"color": f"--{shown.color}", "width": 2.5},
                "fill": "tozeroy",
                "fillcolor": f"--{shown.color}-fill",
            }
        )
    return {
        "data": traces,
        "layout": {
            "xaxis": {"range": [0, 2 * middle], "zeroline": False, "showgrid": False},
            "yaxis": {"title": {"text": unit}, "rangemode": "tozero", "automargin": True},
            "legend": {"orientation": "h", "x": 0, "y": -0.1, "yanchor": "top"},
            "margin": {"l": 50, "r": 30, "t": 28, "b": 64},
            "shapes": [
                {
                    "type": "line",
                    **{"x0": middle, "x1": middle, "y0": 0, "y1": 1, "yref": "paper"},
                    "line": {"color": "--line", "width": 1, "dash": "dot"},
                }
            ],
            "annotations": [
                {
                    "text": text,
                    **{"x": middle, "xanchor": anchor, "xshift": shift},
                    **{"y": 1, "yref": "paper", "yanchor": "bottom"},
                    "showarrow": False,
                    "font": {"color": "--faint", "size": 12},
                }
                for text, anchor, shift in (
                    ("forward →", "right", -6),
                    ("backward →", "left", 6),
                )
            ],
        },
        "ticks": [*_ticks(names)],
    }


def _ticks(names: Sequence[str]) -> Iterator[tuple[float, str]]:
    """Yield positions and names of layers in forward: of numbered layers if there are any.

    Of consecutive layers with one number, as ``convs.1`` and ``norms.1``, the first is named.
    """
    numbers = [re.sub(r".*?(\d*)$", r"\1", name) for name in names]
    last = ""
    for place, (name, number) in enumerate(zip(names, numbers, strict=True)):
        if number != last if number else not any(numbers):
            yield place + 0.5, escape(shorten(label_of(name), _TICK))
            last = number


class _Area(NamedTuple):
    """An area of a treemap, by the names of plotly.js."""

    ids: str
    parents: str
    labels: str
    text: str
    values: int
    customdata: str
    colors: str


def treemap(report: Report, field: str) -> dict[str, Any]:
    """Draw the layers as areas, and their contexts inside.

    Args:
        report: The numbers.
        field: The size of the areas, ``raw_bytes`` or ``stored_bytes``; the report has some.
    """
    columns = dict(zip(_Area._fields, zip(*_areas(report, field), strict=True), strict=True))
    colors = columns.pop("colors")
    return {
        "data": [
            {
                "type": "treemap",
                **columns,
                "branchvalues": "total",
                "texttemplate": "%{label}<br>%{text}",
                "hovertemplate": "%{customdata}<extra></extra>",
                "maxdepth": 2,
                "marker": {
                    "colors": colors,
                    "line": {"color": "--ground", "width": 1.5},
                    "pad": {"t": 20, "l": 3, "r": 3, "b": 3},
                    "cornerradius": 3,
                },
                "tiling": {"packing": "squarify", "pad": 2},
                "root": {"color": "rgba(0,0,0,0)"},
                "pathbar": {"visible": False},
            }
        ],
        "layout": {
            "margin": {"l": 0, "r": 0, "t": 0, "b": 0},
            # Text that does not fit is hidden; the box at the pointer shows it.
            "uniformtext": {"minsize": 10, "mode": "hide"},
        },
    }


def _areas(report: Report, field: str) -> Iterator[_Area]:
    total = getattr(report, field)

    def area(key: str, parent: str, label: str, hover: str, count: int, color: str) -> _Area:
        hover += f"<br><b>{format_bytes(count)}</b>, {count / total:.1%}"
        return _Area(key, parent, label, format_bytes(count), count, hover, color)

    def outer(key: str, parent: str, name: str, part: Contexts) -> _Area:
        label, count = escape(shorten(name, _LABEL)), getattr(part, field)
        if not parent:
            # The strip above the inner areas shows the label only.
            return area(key, "", f"{label}  {format_bytes(count)}", wrap(name), count, "--parent")
        largest = max(part.contexts, key=lambda row: getattr(row, field))
        return area(key, parent, label, wrap(name), count, f"--{largest.role}")

    def inner(layer: Layer) -> Iterator[_Area]:
        for place, row in enumerate(layer.contexts):
            count = getattr(row, field)
            if not count:
                continue
            label = wrap(shorten(row.slot[len(layer.name) :].lstrip("/."), _LABEL), 12)
            hover = f"{wrap(row.slot)}<br>{row.role} [{' x '.join(map(str, row.shape))}]"
            if field == "stored_bytes":
                hover += f", {row.codec}" + ("" if row.bits is None else f", {row.bits:g} bits")
            key = f"layer {layer.name}"
            yield area(f"{key}, {place}", key, label, hover, count, f"--{row.role}")

    layers = [layer for layer in by_layer(report.contexts) if getattr(layer, field)]
    kinds: dict[str, list[Layer]] = {}
    for layer in layers:
        kinds.setdefault(layer.kind if len(layers) > _MANY else layer.name, []).append(layer)
    for kind, members in kinds.items():
        parent = ""
        if len(members) > 1:
            parent = f"kind {kind}"
            rows = [row for layer in members for row in layer.contexts]
            yield outer(parent, "", kind, Contexts(rows))
        for layer in members:
            yield outer(f"layer {layer.name}", parent, layer.label, layer)
            yield from inner(layer)


def bar_chart(report: Report, path: str | Path) -> None:
    """Write raw and stored bytes of the largest contexts as an image, by matplotlib."""
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError(
            "Expected matplotlib for a plot (got none): pip install matplotlib"
        ) from error
    rows = report.largest_first[:SHOWN][::-1]
    figure = Figure(figsize=(9, 1.5 + 0.35 * len(rows)), layout="constrained")
    axes = figure.add_subplot()
    places = range(len(rows))
    for shift, name, color in ((0.2, "raw", "#9aa5b1"), (-0.2, "stored", "#d1495b")):
        widths = [getattr(row, f"{name}_bytes") / 2**20 for row in rows]
        axes.barh([p + shift for p in places], widths, height=0.4, label=name, color=color)
    # Matplotlib reads a pair of dollars as mathematics.
    axes.set_yticks(list(places), [row.slot.replace("$", r"\$") for row in rows], fontsize=8)
    axes.set_xlabel("MiB saved for backward")
    axes.set_title(report.headline, fontsize=10)
    axes.legend(loc="lower right")
    figure.savefig(path, dpi=120)
