"""The memory and the traffic of graphs that are not here: formulas beside what runs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from datasets.published import Size
from experiments import scale
from experiments.scale import Network, Part

SMALL = Size(20_000, 120_000, 32, 8)
COUNTED = {
    "parts": 2,
    "nodes": [60, 40],
    "edges": [300, 500],
    "halo": [10, 20],
    "sends": [25, 5],
}


def test_parts_have_the_shares_of_a_counted_graph() -> None:
    parts = scale.parts_of(SMALL, COUNTED)
    assert parts == [Part(12_000, 2_000, 5_000, 45_000), Part(8_000, 4_000, 1_000, 75_000)]
    most = scale.largest(parts)
    assert most == Part(12_000, 4_000, 5_000, 75_000)
    assert most.data_bytes(SMALL) == 12_000 * (32 * 4 + 8) + 75_000 * 16
    network = Network("gcn", 2, 16, 1)
    assert parts[0].sent_bytes(network, 8) == 5_000 * 4 * (16 + 8 + 2) + 2_000 * 4 * (16 + 8)


@pytest.mark.long
@pytest.mark.usefixtures("forked")
@pytest.mark.parametrize("model", scale.MODELS)
def test_bytes_sent_are_those_of_a_run(model: str) -> None:
    heads = 3  # of the network that runs
    found = scale.sent([model, 2, 8, heads], "digits", 2)
    assert found["predicted"] == found["measured"] > 0


@pytest.mark.long
def test_a_plan_for_a_larger_graph_is_kept() -> None:
    network, dataset = ["gcn", 2, 64, 1], "synthetic:ogbn-arxiv@0.2"
    found = scale._apart("trained", network, dataset, 150e6)
    assert found["predicted"] < 150e6
    assert found["measured"] == pytest.approx(found["predicted"], rel=0.05)
    assert scale._apart("trained", network, dataset, 1e6) == {}


def test_checks_without_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def apart(name: str, calls: Any, _: Any) -> list[dict[str, Any]]:
        return [{"peak": 5} if name in enough else {"reason": "out of memory"}]

    monkeypatch.setattr(scale, "call_together", apart)
    flags = ["--check", "--models", "gcn", "--out", str(tmp_path)]
    enough: list[str] = []
    assert scale.main(flags) == 1
    assert capsys.readouterr().err == "scale: stock: out of memory\n"
    enough.append("experiments.scale:stock")
    assert scale.main(flags) == 0
    rows = json.loads((tmp_path / "checks.json").read_text())["rows"]
    assert {row["measured"] for row in rows} == {None} and rows[0]["predicted"] == 5


@pytest.mark.long
def test_more_memory_never_takes_more_processes() -> None:
    network = Network("gat", 2, 16, 2)
    large = SMALL._replace(nodes=2_000_000, edges=12_000_000)
    found = [
        scale.processes(network, large, memory, [COUNTED])
        for memory in (10**6, 1_500 * 10**6, 10**12)
    ]
    assert [row["parts"] for row in found] == [None, 2, 1]
    assert found[0]["most"] == 2 and found[1]["sent"] > 0 and found[2]["bits"] == 32


def test_a_graph_of_ones_own(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    size = ["--nodes", "50000", "--edges", "200000", "--features", "16", "--classes", "4"]
    counted = tmp_path / "partition.json"
    counted.write_text(json.dumps({"counted": [COUNTED]}))
    network = ["--models", "gcn", "--hidden", "16", "--layers", "2", "--memory", "1GB,1MB"]
    flags = [*size, *network, "--counted", str(counted), "--out", str(tmp_path / "out")]
    assert scale.main(flags) == 0
    assert "your graph" in capsys.readouterr().out
    content: Any = json.loads((tmp_path / "out" / "scale.json").read_text())
    [row] = content["rows"]
    assert row["data"] < row["least"] <= row["stock"]
    text = scale.needs(content).markdown()
    assert "| your graph | gcn | 50,000 | 200,000 |" in text and text.endswith(
        "| 1: exact | more than 2 |"
    )


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--nodes", "5"], "Expected --nodes, --edges, --features and --classes together"),
        (["--counted", "README.md"], "Expected --counted to be a result of experiments.partition"),
        (["--memory", "8 gigs"], "8 gigs"),
    ],
)
def test_a_fault_of_a_flag(
    flags: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert scale.main([*flags, "--out", str(tmp_path)]) == 2
    assert message in capsys.readouterr().err
