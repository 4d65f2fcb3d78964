"""Compiled models beside others: figures of one network."""

from __future__ import annotations

import pytest

from experiments.compiled import compare


@pytest.mark.long
@pytest.mark.filterwarnings("ignore")
def test_each_way_has_its_figures() -> None:
    rows = {row["way"]: row for row in compare("gcn", "digits", "data", 4, 1)}
    assert [*rows] == [
        *("compiled", "compiled, 4 bit", "compiled, lossless", "4 bit, as PyG", "4 bit, blocks")
    ]
    assert max(rows[way]["error"] for way in ("compiled", "compiled, lossless")) < 1e-6
    assert 1e-4 < rows["compiled, 4 bit"]["error"] < 0.3
    assert rows["compiled, 4 bit"]["saved"] < rows["compiled, 4 bit"]["raw"] / 4
    assert all(row["seconds"] > 0 and row["peak"] for row in rows.values())
    assert rows["compiled"]["breaks"] == 0
