"""Tables and the picture of saved bytes against the gradient's error."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from experiments.helpers import codes
from experiments.helpers.pictures import draw_codes


def row(
    variant: str, bits: int, saved: float, variance: float, bias: float = 0.0
) -> dict[str, Any]:
    sizes = {"variant": variant, "bits": bits, "saved_bytes": saved * 1e6, "variance": variance}
    return sizes | {"bias": bias, "bias_squared": bias**2, "bias_squared_error": 0.0}


@pytest.fixture
def found(tmp_path: Path) -> list[codes.Pair]:
    now = [row("L1", 3, 3.0, 0.01), row("L1", 2, 2.0, 0.1), row("gact", 2, 9.0, 0.2, bias=0.5)]
    before = [row("L1", 1, 3.0, 100.0), row("L1", 2, 4.0, 1.0)]
    other = [row("L1", 1, 1.0, 10.0), row("L1", 2, 2.5, 0.4)]
    for path, model, rows in (
        ("gcn.json", "gcn", now),
        ("0.7.0/gcn.json", "gcn", before),
        ("gat.json", "gat", now[:2]),
        ("0.7.0/gat.json", "gat", other),
    ):
        (tmp_path / path).parent.mkdir(exist_ok=True)
        content = {"model": model, "dataset": "cora.npz", "commit": path, "rows": rows}
        (tmp_path / path).write_text(json.dumps(content))
    return codes.pairs(tmp_path)


def test_variances_in_equal_bytes(found: list[codes.Pair]) -> None:
    gcn, gat = codes.equal_bytes(found).rows
    assert gcn[1:-1] == ("cora", "4.00 MB, 1", "", "2.00 MB, 0.1", "below 0.001")
    # sqrt(0.1 * 0.01) / 0.4, and 0.1 / (10^(1/3) * 0.4^(2/3))
    assert gat[1:-1] == ("cora", "2.50 MB, 0.4", "0.079", "2.00 MB, 0.1", "0.085")
    assert gcn[-1] == "0.7.0/gcn.json, gcn.json"


def test_widths_of_both_versions(found: list[codes.Pair]) -> None:
    two, three = ("4.00 MB, 1", "2.00 MB, 0.1"), ("", "3.00 MB, 0.01")
    rows = [line[1:4] for line in codes.by_bits(found).rows[:3]]
    assert rows == [("1", "3.00 MB, 100", ""), ("2", *two), ("3", *three)]
    assert codes.widths(found).rows[0][3] == "0.10"


def test_peers_are_drawn_with_their_bias(found: list[codes.Pair]) -> None:
    (pair,) = codes.with_peers(found)
    assert codes.peers([pair]).rows[-1][1:] == (
        "GACT",
        "2",
        "9.00 MB",
        "0.2",
        "50.00% (below 50.00%)",
    )
    svg = draw_codes([pair])
    assert "GACT, 2 bit: 9.00 MB, 0.45" in svg and "now at 2 bits: 0.1" in svg
