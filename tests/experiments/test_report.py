"""The report of a run, as Markdown."""

from __future__ import annotations

from pathlib import Path

from experiments_samples import record, results

from experiments.helpers.report import render, write_report
from experiments.helpers.tables import Table


def test_report_holds_every_part() -> None:
    text = render(results(record(0), record(4, peak_bytes=None), dataset="x/arxiv_graph.npz"))
    lines = text.splitlines()
    assert lines[0] == "# GAT on arxiv_graph.npz, 4 bit (L1)"
    assert "| test accuracy, % | 54.00 ± 5.66 |" in lines
    assert "![Curves](curves.png)" in lines
    assert "| 0 | 50.00 | 60.00 | 2 | 7.5x | 9.0 MB | 0.250 |" in lines
    assert "| 4 | 58.00 | 60.00 | 2 | 7.5x | - | 0.250 |" in lines
    assert "## Where the memory went (seed 4)" in lines
    context = "| `convs.0/lin/linear.input` | node | quantize | 4 | 3.0 MB | 400.0 kB |"
    assert context in lines
    assert "| lr | 0.01 |" in lines
    assert "| torch version | 2.13.0 |" in lines
    assert "features of this file are not OGB's" in text


def test_bars_do_not_break_a_table() -> None:
    assert Table(("a",), [("x|y",)]).markdown() == "| a |\n| --- |\n| x\\|y |"


def test_written(tmp_path: Path) -> None:
    found = results(record(0))
    write_report(found, tmp_path)
    assert (tmp_path / "report.md").read_text(encoding="utf-8") == render(found)
