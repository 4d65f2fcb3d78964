"""One graph over several processes of this machine, and what is counted for more of them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from experiments import partition
from experiments.helpers.network_model import BANDWIDTH, LATENCY, bytes_of_row, modelled
from experiments.helpers.pictures import draw_partition
from experiments.helpers.result_tables import _partition

LINE = (
    "--model gcn --parts 1,2 --ways lossless+blocks --halo-bits 32,8 --count 8 --hidden 8 "
    "--layers 2 --cut order --steps"
)
FLAGS = [*LINE.split(), "2"]


@pytest.mark.usefixtures("forked")
def test_end_to_end(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert partition.main([*FLAGS, "--out", str(tmp_path)]) == 0
    found = json.loads((tmp_path / "partition.json").read_text())
    alone, exact, coded = found["runs"]
    assert [len(run["ranks"]) for run in found["runs"]] == [1, 2, 2]
    [one] = alone["ranks"]
    assert one["sent_bytes"] == one["halo"] == 0
    assert sum(rank["nodes"] for rank in exact["ranks"]) == one["nodes"]
    assert sum(rank["edges"] for rank in exact["ranks"]) == one["edges"]
    for rank in exact["ranks"]:
        # Up to rounding, which Adam's division magnifies.
        assert rank["loss"] == pytest.approx(one["loss"], rel=1e-3)
        # Widths of 8 and of 10 classes, and one number of the normalization in each layer.
        assert rank["forward_bytes"] == 4 * (8 + 10 + 2) * rank["sends"]
        assert rank["sent_bytes"] - rank["forward_bytes"] == 4 * (8 + 10) * rank["halo"]
        assert rank["exchanges"] == 2 * 3
        assert rank["peak_bytes"] > 0 and rank["step_process_seconds"] > 0
    for rank, full in zip(coded["ranks"], exact["ranks"], strict=True):
        assert rank["sent_bytes"] < 0.5 * full["sent_bytes"]
    # The same command measures nothing again.
    before = (tmp_path / "partition.json").stat().st_mtime_ns
    assert partition.main([*FLAGS, "--out", str(tmp_path)]) == 0
    assert (tmp_path / "partition.json").stat().st_mtime_ns == before
    assert "lossless+blocks" in capsys.readouterr().out
    assert partition.main([*FLAGS[:-1], "3", "--out", str(tmp_path)]) == 1
    text = _partition(found)
    assert len(partition.measured(found).rows) == 3
    assert len(partition.counted(found).rows) == 2
    assert draw_partition(found).count("stroke-dasharray") == 2
    assert "10 Gbit/s" in text and "after 2 steps" in text


def test_graphs_that_grow_with_the_processes() -> None:
    def content(model: str, parts: int, seconds: float) -> dict[str, Any]:
        rank = {"nodes": 50, "edges": 700, "halo": 9, "peak_bytes": 1e6, "sent_bytes": 2e6}
        times = {"step_process_seconds": seconds, "exchange_process_seconds": 0.1 * seconds}
        run = {"parts": parts, "way": "L1+blocks", "halo_bits": 32}
        ranks = parts * [rank | times | {"loss": 1.0}]
        return {"model": model, "runs": [run | {"ranks": ranks}]}

    contents = content("gcn", 1, 2.0), content("gat", 2, 5.0), content("gat", 1, 4.0)
    assert [[*row] for row in partition.grown(contents).rows] == [
        ["GAT", "1", "50", "700", "L1+blocks", "", "1.0", "4.00", "1.00x", ""],
        ["GAT", "2", "100", "1,400", "L1+blocks", "32", "1.0", "5.00", "1.25x", "10.0%"],
        ["GCN", "1", "50", "700", "L1+blocks", "", "1.0", "2.00", "1.00x", ""],
    ]


def test_the_model_adds_the_work_of_the_largest_part_and_its_bytes() -> None:
    ranks = [
        {"forward_bytes": 100, "sent_bytes": 140, "sends": 5, "halo": 2, "exchanges": 4},
        {"forward_bytes": 60, "sent_bytes": 120, "sends": 3, "halo": 6, "exchanges": 4},
    ]
    assert bytes_of_row(ranks) == (20.0, 12.5)
    size = {"sends": [2, 4], "halo": [4, 2], "edges": [30, 10], "nodes": [3, 3], "parts": 2}
    found = modelled(size, ranks, {"step_seconds": 8.0})
    assert found["sent_bytes"] == 4 * 20 + 2 * 12.5
    network = 105 / BANDWIDTH + 4 * LATENCY
    assert found["network_seconds"] == pytest.approx(network)
    assert found["step_seconds"] == pytest.approx(6.0 + network)
    assert modelled(size, ranks, None)["step_seconds"] is None


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ("--parts 1,none", "--parts: Expected a whole number"),
        ("--parts 1,4096", "Expected --parts of up to"),
        ("--halo-bits 99", "--halo-bits: Expected"),
        ("--ways CB2", "Expected --ways of lossless"),
    ],
)
def test_bad_flags(
    flags: str, words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert partition.main([*flags.split(), "--out", str(tmp_path)]) == 2
    assert words in capsys.readouterr().err
