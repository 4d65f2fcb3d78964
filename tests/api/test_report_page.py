"""The content of the page, and its errors. A browser opens it in another file."""

import json
import re
import sys

import pytest
from samples import GraphNet, graph, make, train_step

import gact_graph
from gact_graph.api.report import Report
from gact_graph.api.report.figures import curve, treemap
from gact_graph.support.rows import LayerRow, Row


def row(slot, raw=1000, stored=100, host=0, role="node"):
    return Row(slot, role, "quantize", (25, 10), 250, 4, raw, stored, None, host)


@pytest.fixture(scope="module")
def trained():
    model = gact_graph.wrap(make(lambda: GraphNet("gat")), bits=3, min_bytes=0)
    train_step(model, *graph())
    return gact_graph.report(model)


def test_the_page_is_one_file_that_loads_nothing(trained, tmp_path):
    trained.save(tmp_path / "memory.html")
    page = (tmp_path / "memory.html").read_text(encoding="utf-8")
    assert [path.name for path in tmp_path.iterdir()] == ["memory.html"]
    own = re.sub(r"<script>.*?</script>", "", page, flags=re.DOTALL)
    assert not re.search(r"<(link|img|iframe)|\bsrc=|url\(|@import|https?://", own)
    assert "default-src 'none'" in own
    assert all(context.slot.split("/")[-1] in own for context in trained.contexts)


def test_a_name_may_be_a_string_and_replaces_the_file(tmp_path):
    path = tmp_path / "Memory.HTM"
    path.write_text("old")
    Report([row("a/b.c")]).save(str(path))
    assert path.read_text(encoding="utf-8").startswith("<!doctype html>")


@pytest.mark.parametrize("name", ["memory.png", "memory", "memory.html.gz"])
def test_other_endings_are_refused(trained, tmp_path, name):
    with pytest.raises(ValueError, match=rf"ends in \.html \(got '{name}'\).*report\.plot"):
        trained.save(tmp_path / name)
    assert not [*tmp_path.iterdir()]


def test_a_missing_folder_is_named(trained, tmp_path):
    with pytest.raises(FileNotFoundError, match=r"Expected a folder that exists \(got .*nowhere'"):
        trained.save(tmp_path / "nowhere" / "memory.html")


def test_an_empty_report_is_refused(tmp_path):
    with pytest.raises(ValueError, match=r"Expected a report with contexts \(got none\)"):
        Report(empty=True).save(tmp_path / "memory.html")


def test_without_plotly_the_way_out_is_named(trained, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "plotly.offline", None)
    with pytest.raises(ImportError, match=r"Expected plotly .*pip install plotly"):
        trained.save(tmp_path / "memory.html")


def test_names_cannot_break_out_of_the_page(tmp_path):
    bad = "</script><script>alert(1)</script>/<b>x</b>.\"'&amp;"
    Report([row(bad)]).save(tmp_path / "memory.html")
    page = (tmp_path / "memory.html").read_text(encoding="utf-8")
    assert "<script>alert" not in page and "<b>x" not in page
    match = re.search(r'<script type="application/json" id="figures">(.*?)</script>', page)
    assert json.loads(match[1])["stock"]["data"][0]["values"] == [1000, 1000]


def test_memory_grows_in_forward_and_shrinks_in_backward():
    rows = [row("convs.0/a.b", 2**20, 10), row("convs.0/c.d", 2**20, 20), row("relu.x", 2**21, 40)]
    rows.append(row("convs.1/a.b", 2**22, 80, host=60))
    stock, now, device = curve(Report(rows))["data"]
    assert stock["y"] == [0, 2, 4, 8, 4, 2, 0]  # MiB
    assert now["customdata"] == ["0 B", "30 B", "70 B", "150 B", "70 B", "30 B", "0 B"]
    assert device["customdata"] == ["0 B", "30 B", "70 B", "90 B", "70 B", "30 B", "0 B"]
    assert now["text"][1] == "forward, after convs.0"
    assert now["text"][-1] == "backward, after convs.0"


def test_where_a_part_of_stock_is_not_known_raw_is_not_called_stock(tmp_path):
    rows = [row("convs.0/propagate.x")]
    counted = LayerRow("convs.1/propagate", "blocks", 3, None)
    again = [
        LayerRow("convs.0/propagate", "blocks", 3, None, counted=False),
        LayerRow("convs.0", "recomputed", None, None, counted=False),
    ]
    unknown = Report(rows, layers=[*again, counted])
    for report, word, other in (
        (unknown, "raw", "stock"),
        (Report(rows, layers=[counted]), "stock", "raw"),
    ):
        assert curve(report)["data"][0]["name"] == word
        report.save(tmp_path / "memory.html")
        page = (tmp_path / "memory.html").read_text(encoding="utf-8")
        assert f'<button type="button">{word}</button>' in page
        assert f'<button type="button">{other}' not in page
        said = "tensors that stock PyTorch would save inside convs.0: their size is unknown"
        assert (said in " ".join(str(report).split())) == (said in page) == (report is unknown)


def test_one_layer_is_a_step_too():
    (stock, _) = curve(Report([row("relu.result", 7, 7)]))["data"]
    assert stock["y"] == [0, 7, 0]


def test_of_layers_with_one_number_the_first_is_named_below_the_axis():
    rows = [row(f"{name}.{i}/a.b") for i in range(3) for name in ("convs", "norms")]
    rows += [row(f"head.{i}/a.b") for i in range(2)]
    names = [name for _, name in curve(Report([*rows, row("relu.x")]))["ticks"]]
    assert names == ["convs.0", "convs.1", "convs.2", "head.0", "head.1"]


def test_areas_add_up():
    rows = [row(f"convs.{i}/{name}.x", 1000 + i, 10) for i in range(3) for name in "abc"]
    rows.append(row("convs.0/d.x", 0, 77))
    report = Report(rows)
    for field, total in (("raw_bytes", report.raw_bytes), ("stored_bytes", report.stored_bytes)):
        (trace,) = treemap(report, field)["data"]
        assert _sum_of(trace, "") == total
        assert len(set(trace["ids"])) == len(trace["ids"])
        for key in set(trace["parents"]) - {""}:
            assert _sum_of(trace, key) == trace["values"][trace["ids"].index(key)]
        assert 0 not in trace["values"]


def test_many_layers_of_one_kind_lie_together():
    rows = [row(f"{name}.{i}/a.b") for i in range(20) for name in ("convs", "norms")]
    (trace,) = treemap(Report(rows), "raw_bytes")["data"]
    top = [n for n, parent in zip(trace["labels"], trace["parents"], strict=True) if not parent]
    assert [name.split()[0] for name in top] == ["convs", "norms"]
    assert _sum_of(trace, "") == 40_000


def _sum_of(trace, parent):
    pairs = zip(trace["values"], trace["parents"], strict=True)
    return sum(value for value, its in pairs if its == parent)
