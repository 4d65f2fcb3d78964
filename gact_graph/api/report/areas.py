"""Where the bytes are, as a treemap of plotly.js: a plain dict.

Colors are names of the page's style variables, so that they follow its theme.
"""

from __future__ import annotations

from typing import Any

from gact_graph.api.report.contexts import Contexts
from gact_graph.api.report.data import ReportData
from gact_graph.api.report.layers import Layer, by_layer
from gact_graph.api.report.markup import escape, wrapped
from gact_graph.api.report.names import shorten
from gact_graph.api.report.units import format_bytes
from gact_graph.support.rows import Row

_MANY = 16
"""Layers from which on those of one kind, as ``convs.0`` and ``convs.1``, lie in an area together,
and their contexts are shown only once a layer is selected."""

_LABEL = 20  # characters


def areas(report: ReportData, field: str) -> dict[str, Any]:
    """The layers, and in each its contexts.

    Args:
        report: The numbers.
        field: ``raw_bytes`` or ``stored_bytes``: what areas stand for.
    """
    found = _Areas(field, getattr(report, field))
    layers = [layer for layer in by_layer(report.contexts) if getattr(layer, field)]
    many = len(layers) > _MANY
    kinds: dict[str, list[Layer]] = {}
    for layer in layers:
        kinds.setdefault(layer.kind if many else layer.name, []).append(layer)
    for kind, members in kinds.items():
        inside = ""
        if len(members) > 1:
            inside = f"kind {kind}"
            rows = [row for layer in members for row in layer.contexts]
            found.add(inside, "", kind, Contexts(rows), heads=True)
        for layer in members:
            found.add(f"layer {layer.name}", inside, layer.label, layer, heads=not inside)
            found.add_contexts(layer)
    return {
        "data": [
            {
                "type": "treemap",
                **found.columns,
                "branchvalues": "total",
                "texttemplate": "%{label}<br>%{text}",
                "hovertemplate": "%{customdata}<extra></extra>",
                "maxdepth": 2,
                "marker": {
                    "colors": found.colors,
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
            # What does not fit is left out; the box that follows the pointer has it.
            "uniformtext": {"minsize": 10, "mode": "hide"},
        },
    }


class _Areas:
    """Areas, column by column.

    Args:
        field: What they stand for.
        total: Of all of them, in bytes.

    Attributes:
        columns: What plotly.js is told of each.
        colors: Of each.
    """

    def __init__(self, field: str, total: int) -> None:
        names = ("ids", "parents", "labels", "text", "values", "customdata")
        self.columns: dict[str, list[Any]] = {name: [] for name in names}
        self.colors: list[str] = []
        self._field = field
        self._total = total

    def add(self, key: str, parent: str, name: str, part: Contexts, heads: bool) -> None:
        """Adds a layer, or layers of one kind.

        Args:
            key: Of the area.
            parent: The key of the area around it; empty where there is none.
            name: To show.
            part: Its contexts.
            heads: Whether what lies in it is seen. Else it has the color of its largest context.
        """
        value: int = getattr(part, self._field)
        largest = max(part.contexts, key=lambda row: getattr(row, self._field))
        color = "--parent" if heads else f"--{largest.role}"
        # The strip above what lies inside shows the label and no text.
        label = escape(shorten(name, _LABEL)) + (f"  {format_bytes(value)}" if heads else "")
        self._append(key, parent, label, value, wrapped(name), color)

    def add_contexts(self, layer: Layer) -> None:
        """Adds what lies inside a layer."""
        for place, row in enumerate(layer.contexts):
            value: int = getattr(row, self._field)
            if value:
                inside = shorten(row.slot[len(layer.name) :].lstrip("/."), _LABEL)
                label = wrapped(inside, 12)
                hover = f"{wrapped(row.slot)}<br>{self._way(row)}"
                key = f"layer {layer.name}"
                self._append(f"{key}, {place}", key, label, value, hover, f"--{row.role}")

    def _append(
        self, key: str, parent: str, label: str, value: int, hover: str, color: str
    ) -> None:
        hover += f"<br><b>{format_bytes(value)}</b>, {value / self._total:.1%}"
        cells = (key, parent, label, format_bytes(value), value, hover)
        for column, cell in zip(self.columns.values(), cells, strict=True):
            column.append(cell)
        self.colors.append(color)

    def _way(self, row: Row) -> str:
        """How a context is kept."""
        shape = f"{row.role} [{' x '.join(map(str, row.shape))}]"
        if self._field == "raw_bytes":
            return shape
        return f"{shape}, {row.codec}" + ("" if row.bits is None else f", {row.bits} bits")
