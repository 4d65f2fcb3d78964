"""The rows of the report's table, whatever draws them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from gact_graph.api.report.contexts import Contexts
from gact_graph.api.report.data import ReportData
from gact_graph.api.report.layers import Layer, by_layer
from gact_graph.api.report.units import format_bytes
from gact_graph.support.rows import Row

_SHOWN = 20
"""Contexts that have rows of their own, the largest."""

LEFT = ("slot", "layer", "role", "codec")
"""Columns of words; the others are of numbers."""

Cells = dict[str, str]
"""What stands in a row, by column."""


@dataclass(frozen=True)
class Line:
    """One row.

    Attributes:
        name: What stands first.
        cells: What stands in the other columns; nothing where a column is missing.
        level: 1 for a part of the row above.
        heads: Whether rows below are parts of it.
        is_name: Whether it may be shortened as names are.
    """

    name: str
    cells: Cells
    level: int = 0
    heads: bool = False
    is_name: bool = True


def lines_of(report: ReportData) -> list[Line]:
    """The rows, by slot or by layer as the report has it."""
    return [*(_of_layers(report) if report.by == "layer" else _of_slots(report))]


def total_of(report: ReportData) -> Line:
    """The row below them."""
    return Line("total", _total(report))


def columns_of(report: ReportData) -> list[str]:
    """The titles of the columns beside the names."""
    if report.by == "layer":
        return ["contexts", "bits", "raw", "stored", "share"]
    measured = any(row.sensitivity is not None for row in report.contexts)
    return ["role", "codec", *["sensitivity"] * measured, "bits", "raw", "stored", "share"]


def _of_slots(report: ReportData) -> Iterator[Line]:
    """The largest contexts; those of one layer stand together, below their sum if they are many."""
    rows = report.largest_first
    layers = {layer.name: layer for layer in by_layer(report.contexts)}
    for shown in by_layer(rows[:_SHOWN]):
        heads = len(shown.contexts) > 1
        if heads:
            yield Line(shown.label, _sums(layers[shown.name], report), heads=True)
        for row in shown.contexts:
            yield Line(row.slot, _of_context(row, report), level=int(heads))
    if rows[_SHOWN:]:
        label = f"{len(rows) - _SHOWN} smaller contexts"
        yield Line(label, _sums(Contexts(rows[_SHOWN:]), report), is_name=False)


def _of_layers(report: ReportData) -> Iterator[Line]:
    for layer in by_layer(report.contexts):
        yield Line(layer.label, _of_layer(layer, report))


def _of_context(row: Row, report: ReportData) -> Cells:
    return _sums(Contexts([row]), report) | {
        "role": row.role,
        "codec": row.codec,
        "sensitivity": "" if row.sensitivity is None else f"{row.sensitivity:.2g}",
        "bits": "" if row.bits is None else str(row.bits),
    }


def _of_layer(layer: Layer, report: ReportData) -> Cells:
    return _sums(layer, report) | _averages(layer) | {"contexts": str(len(layer.contexts))}


def _total(report: ReportData) -> Cells:
    counted = {"contexts": str(len(report.contexts))}
    return _sums(report, report) | _averages(report) | counted


def _sums(part: Contexts, report: ReportData) -> Cells:
    share = part.stored_bytes / report.stored_bytes if report.stored_bytes else 0.0
    return {
        "raw": format_bytes(part.raw_bytes),
        "stored": format_bytes(part.stored_bytes),
        "share": f"{share:.1%}",
    }


def _averages(part: Contexts) -> Cells:
    return {"bits": "" if part.average_bits is None else f"{part.average_bits:.2f}"}
