"""Rows of a report."""

from __future__ import annotations

from gact_graph.support.rows import Row


def row(
    slot: str,
    raw: int = 1000,
    stored: int = 100,
    bits: int | None = 4,
    numel: int = 250,
    role: str = "node",
    sensitivity: float | None = None,
    host: int = 0,
) -> Row:
    codec = "keep" if bits is None else "quantize"
    shape = (numel // 10, 10)
    return Row(slot, role, codec, shape, numel, bits, raw, stored, sensitivity, host)
