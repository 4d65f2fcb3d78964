"""The paper's tables, each from one command, on graphs that train in seconds."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from scipy import stats

from experiments import paper, scaling
from experiments.helpers import job, summary
from experiments.helpers import paper as published
from experiments.helpers.errors import ExperimentError
from experiments.helpers.strategies import Case


def small_graph(folder: Path, name: str = "small") -> None:
    generator = np.random.default_rng(0)
    np.savez(
        folder / f"{name}.npz",
        edge_index=generator.integers(0, 300, (2, 2000)),
        x=generator.random((300, 16), dtype=np.float32),
        y=np.arange(300) % 3,
    )


class TestInterval:
    def test_is_that_of_the_paired_t_test(self) -> None:
        these, those = [0.71, 0.74, 0.69, 0.70], [0.72, 0.73, 0.71, 0.72]
        mean, half = summary.paired_difference(dict(enumerate(these)), dict(enumerate(those)))
        low, high = stats.ttest_rel(these, those).confidence_interval(0.95)
        assert half is not None
        assert (mean - half, mean + half) == pytest.approx((low, high))

    def test_seeds_are_paired_by_number(self) -> None:
        assert summary.paired_difference({3: 0.5, 4: 1.0}, {4: 0.75, 9: 0.0}) == (0.25, None)
        with pytest.raises(ValueError, match=r"at least one seed in both \(got none\)"):
            summary.paired_difference({0: 1.0}, {1: 1.0})

    def test_as_text(self) -> None:
        assert summary.signed_percent((-0.0012, 0.0034)) == "-0.12 ± 0.34"
        assert summary.signed_percent((0.001, None)) == "+0.10"
        assert summary.signed_percent((-0.00001, None)) == "+0.00"


class TestGraphs:
    def test_the_paper_s_data_sets_come_first(self, tmp_path: Path) -> None:
        small_graph(tmp_path)
        assert paper.graphs_in(tmp_path) == {"small": str(tmp_path / "small.npz")}
        (tmp_path / "Reddit2").mkdir()
        (tmp_path / "ogbn_arxiv").mkdir()
        assert paper.graphs_in(tmp_path) == {"reddit": "reddit", "ogbn-arxiv": "ogbn-arxiv"}

    def test_a_folder_without_graphs_is_refused(self, tmp_path: Path) -> None:
        with pytest.raises(ExperimentError, match="Expected --data to hold data sets"):
            paper.graphs_in(tmp_path)


def test_table_2(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    small_graph(tmp_path)
    out = tmp_path / "out"
    flags = ["table2", "--data", str(tmp_path), "--out", str(out), "--models", "gcn"]
    flags += ["--epochs", "3", "--hidden", "32", "--seeds", "0,1"]
    assert paper.main(flags) == 0
    study = json.loads((out / "table2.json").read_text())["small-gcn"]
    assert [*study["runs"]] == ["fp32", "fixed-4", "adaptive-4", "adaptive-3", "adaptive-2"]
    assert [run["seed"] for run in study["runs"]["adaptive-2"]] == [0, 1]
    assert study["command"].startswith("python -m experiments.paper table2 --data DATA --out DIR")
    text = (out / "table2.md").read_text()
    assert "| GCN | small | adaptive 2 bit | 2 |" in text and "9.0-17.6x" in text
    assert " ± " in text.splitlines()[3]

    # What is there is not trained again.
    monkeypatch.setattr(job, "train", lambda *_: pytest.fail("trained"))
    assert paper.main(flags) == 0
    assert (out / "table2.md").read_text() == text
    assert "Table 2" in capsys.readouterr().out


def test_table_3(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    small_graph(tmp_path)
    seen: list[Case] = []

    def trial(case: Case) -> dict[str, object]:
        """Fits up to 10 layers or 100 channels; three times that with L1, twice in 2 GB."""
        seen.append(case)
        times = 3 if case.strategy == "L1+blocks" else 1
        times *= 2 if case.cap_bytes == 2_000_000_000 else 1
        fits = (case.layers or 0) <= 10 * times
        if not fits or (case.hidden or 0) > 100 * times:
            return {"reason": "out of memory"}
        return {"peak_bytes": 1, "step_seconds": 1}

    monkeypatch.setattr(scaling, "run", trial)
    out = tmp_path / "out"
    flags = ["table3", "--data", str(tmp_path), "--out", str(out), "--memory", "1GB,2GB"]
    flags += ["--variants", "stock,L1+blocks", "--models", "gcn,gat,gcnii"]
    assert paper.main(flags) == 0
    rows = json.loads((out / "table3.json").read_text())["rows"]
    keys = ("model", "memory", "vary", "variant")
    found = {tuple(row[key] for key in keys): row["largest"] for row in rows}
    assert found["gcn", "1GB", "depth", "stock"] == 10
    assert found["gcn", "2GB", "depth", "L1+blocks"] == pytest.approx(60, rel=0.05)
    assert found["gat", "1GB", "width", "L1+blocks"] == pytest.approx(300, rel=0.05)
    text = (out / "table3.md").read_text()
    paper_sizes = "24, 152 (6.3x), 240 (10.0x)"
    assert f"| GCN | depth | 1GB | 10 | 30 (3.0x) | {paper_sizes} |" in text
    assert "| GAT | depth | 1GB | 10 | 30 (3.0x) |  |" in text
    assert "| GCNII | width | 2GB |" in text

    without_stock = [row for row in rows[:3] if row["variant"] == "L1+blocks"] + rows[2:3]
    assert [row[3:5] for row in published.table3(without_stock).rows] == [
        ("30", "not run"),
        ("not run", "100"),
    ]

    tries = len(seen)
    assert paper.main(flags) == 0
    assert len(seen) == tries
    assert "Table 3" in capsys.readouterr().out


def test_table_4_needs_a_gpu(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["table4", "--data", str(tmp_path), "--out", str(tmp_path), "--device", "cpu"]
    assert paper.main(flags) == 2
    assert "Expected a CUDA device for table4" in capsys.readouterr().err


def test_figure_3_is_the_study_of_sensitivities(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    small_graph(tmp_path)
    asked: list[list[str]] = []

    def study(argv: list[str]) -> int:
        asked.append(argv)
        out = Path(argv[argv.index("--out") + 1])
        out.mkdir(parents=True)
        (out / "sensitivity.json").write_text("{}")
        return 0

    monkeypatch.setattr(paper.sensitivity, "main", study)
    flags = ["figure3", "--data", str(tmp_path), "--out", str(tmp_path / "out"), "--epochs", "3"]
    assert paper.main(flags) == 0
    [argv] = asked
    assert argv[:2] == ["--model", "gat"] and argv[argv.index("--points") + 1] == "3"


def test_a_part_that_fails_ends_the_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    small_graph(tmp_path)
    monkeypatch.setattr(paper.sensitivity, "main", lambda argv: 1)
    assert paper.main(["figure3", "--data", str(tmp_path), "--out", str(tmp_path)]) == 1
    assert "ended with 1" in capsys.readouterr().err
    monkeypatch.setattr(paper.sensitivity, "main", lambda argv: 130)  # after Ctrl-C
    assert paper.main(["figure3", "--data", str(tmp_path), "--out", str(tmp_path)]) == 130
