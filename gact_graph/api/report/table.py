"""The report as a table, by slot or by layer."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from gact_graph.api.report.contexts import Contexts, by_layer
from gact_graph.api.report.names import counted, format_bytes
from gact_graph.api.report.sheet import Line, Sheet

if TYPE_CHECKING:
    from gact_graph.api.report.report import Report

SHOWN = 20
"""Contexts with rows of their own, the largest."""


def sheet_of(report: Report) -> Sheet:
    """Return the rows by slot or by layer, the total, and the lines below."""
    if report.empty:
        return Sheet("", notes=[report.why_empty])
    lines = _by_slot(report)
    if report.by == "layer":
        layers = by_layer(report.contexts)
        lines = (Line(layer.label, _averages(layer, report)) for layer in layers)
    costs = "; ".join(f"{name}: {value}" for name, value in report.costs.items())
    return Sheet(
        report.headline,
        [report.by, *_columns(report)],
        [*lines],
        Line("total", _averages(report, report)),
        caption="saved for backward in the last forward",
        dispensable=("sensitivity", "role", "contexts", "share", "codec", "bits"),
        notes=[*([costs] if costs else []), *report.remarks],
    )


def _columns(report: Report) -> list[str]:
    if report.by == "layer":
        return ["contexts", "bits", "raw", "stored", "share"]
    measured = any(row.sensitivity is not None for row in report.contexts)
    return ["role", "codec", *["sensitivity"] * measured, "bits", "raw", "stored", "share"]


def _by_slot(report: Report) -> Iterator[Line]:
    """Yield the largest contexts, grouped by layer below the sum of the layer."""
    rows = report.largest_first
    layers = {layer.name: layer for layer in by_layer(report.contexts)}
    for shown in by_layer(rows[:SHOWN]):
        grouped = len(shown.contexts) > 1
        if grouped:
            yield Line(shown.label, _sums(layers[shown.name], report), is_sum=True)
        for row in shown.contexts:
            cells = _sums(Contexts([row]), report) | {
                "role": row.role,
                "codec": row.codec,
                "sensitivity": "" if row.sensitivity is None else f"{row.sensitivity:.2g}",
                "bits": "" if row.bits is None else f"{row.bits:g}",
            }
            yield Line(row.slot, cells, level=int(grouped))
    if rows[SHOWN:]:
        name = counted(len(rows) - SHOWN, "smaller context")
        yield Line(name, _sums(Contexts(rows[SHOWN:]), report), can_shorten=False)


def _sums(part: Contexts, report: Report) -> dict[str, str]:
    share = part.stored_bytes / report.stored_bytes if report.stored_bytes else 0.0
    return {
        "raw": format_bytes(part.raw_bytes),
        "stored": format_bytes(part.stored_bytes),
        "share": f"{share:.1%}",
    }


def _averages(part: Contexts, report: Report) -> dict[str, str]:
    bits = part.average_bits
    return _sums(part, report) | {
        "contexts": str(len(part.contexts)),
        "bits": "" if bits is None else f"{bits:.2f}",
    }
