"""Compiled models beside others: figures of one network."""

from __future__ import annotations

import pytest

from experiments.compiled import compare


@pytest.mark.long
@pytest.mark.filterwarnings("ignore")
def test_each_way_has_its_figures() -> None:
    rows = {row["way"]: row for row in compare("gcn", "digits", "data", 4, 1)}
    coded, exact = ("compiled, 4 bit", "4 bit"), ("compiled, lossless",)
    assert {*rows} == {"compiled", "uncompiled"} | {
        f"{way}, {layers}" for way in (*coded, *exact) for layers in ("blocks", "as PyG")
    }
    for layers in ("blocks", "as PyG"):
        assert rows[f"compiled, lossless, {layers}"]["error"] < 1e-6
        row = rows[f"compiled, 4 bit, {layers}"]
        assert 1e-4 < row["error"] < 0.3 and row["saved"] < row["raw"] / 4
    assert all(row["seconds"] > 0 and row["peak"] for row in rows.values())
    assert rows["compiled"]["breaks"] == 0
