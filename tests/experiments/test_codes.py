"""The table and the picture of saved bytes against the gradient's error."""

from __future__ import annotations

from typing import Any

from experiments.helpers import codes
from experiments.helpers.pictures import draw_codes


def row(
    variant: str, bits: int, saved: float, variance: float, bias: float = 0.0
) -> dict[str, Any]:
    sizes = {"variant": variant, "bits": bits, "saved_bytes": saved * 1e6, "variance": variance}
    return sizes | {"bias": bias, "bias_squared": bias**2, "bias_squared_error": 0.0}


def test_peers_stand_beside_the_library_with_their_bias() -> None:
    rows = [row("gact", 2, 9.0, 0.2, bias=0.5), row("L1", 3, 3.0, 0.01), row("L1", 2, 2.0, 0.1)]
    content = {"model": "gcn", "dataset": "DATA/cora.npz", "rows": rows}
    shown = [line[1:] for line in codes.peers([content]).rows]
    assert shown == [
        ("gact_graph", "2", "2.00 MB", "0.1", "0.00% (below 0.00%)"),
        ("gact_graph", "3", "3.00 MB", "0.01", "0.00% (below 0.00%)"),
        ("GACT", "2", "9.00 MB", "0.2", "50.00% (below 50.00%)"),
    ]
    svg = draw_codes([content])
    assert "GACT, 2 bit: 9.00 MB, 0.45" in svg and "2 bit: 2.00 MB, 0.1" in svg
    assert "GCN, 3 layers of 64, cora" in svg
