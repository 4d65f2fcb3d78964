"""The table, the dict and the plot."""

import dataclasses
import json
import re
import sys

import pytest
import torch
from report_rows import row
from samples import (
    GraphNet,
    Mlp,
    graph,
    make,
    one_thread,  # noqa: F401
    train_step,
)

import gact_graph
from gact_graph.api.report import Report, format_bytes

WORDS = "No forward was compressed yet"


@pytest.fixture(scope="module")
def trained():
    model = gact_graph.wrap(make(lambda: GraphNet("gat")), bits=3, adaptive=False, min_bytes=0)
    train_step(model, *graph())
    return gact_graph.report(model)


def test_before_a_forward_it_says_so(tmp_path):
    report = gact_graph.report(gact_graph.wrap(Mlp(), min_bytes=0))
    assert WORDS in str(report)
    assert report.to_dict() == {
        "raw_bytes": 0,
        "stored_bytes": 0,
        "host_bytes": 0,
        "rate": None,
        "average_bits": None,
        "variance_ratio": None,
        "gradient_error": None,
        "measurements": 0,
        "strategy": None,
        "planned_bytes": None,
        "measured_bytes": None,
        "planned_seconds": None,
        "measured_seconds": None,
        "layers": [],
        "order_bytes": 0,
        "halo_bytes": None,
        "order_seconds": 0.0,
        "sum_bytes": 0,
        "spared_below": None,
        "forward_seconds": None,
        "peak_bytes": None,
        "contexts": [],
    }
    with pytest.raises(ValueError, match=rf"Expected a report with contexts \(got none\).*{WORDS}"):
        report.plot(tmp_path / "a.png")


def test_it_shows_the_cost_of_the_step(trained):
    assert trained.forward_seconds > 0 and trained.peak_bytes > 2**20
    shown = dataclasses.replace(trained, forward_seconds=0.1234, gradient_error=0.0312)
    for text in (str(shown), shown._repr_html_()):
        assert "last forward: 0.123 s; peak memory: " in text
        assert "error of the gradient: 3.1 %" in text
    assert "last forward:" not in str(Report([row("a")]))


def test_rows_of_nothing_in_stock_are_explained():
    words = "a row with 0 B raw shares its storage with another row"
    assert words in str(Report([row("a"), row("b", raw=0, stored=10)]))
    assert words not in str(Report([row("a"), row("b", raw=10, stored=0)]))


def test_calls_that_are_left_alone_have_a_time():
    model = gact_graph.wrap(make(Mlp), min_bytes=2**30)
    for _ in range(2):
        train_step(model, graph()[0])
        assert gact_graph.report(model).forward_seconds > 0


def test_a_forward_without_contexts_is_another_thing():
    model = gact_graph.wrap(torch.nn.Linear(4, 4))
    model(torch.ones(2, 4)).sum().backward()
    text = str(gact_graph.report(model))
    assert WORDS not in text
    assert "total" in text and "0 B" in text


def test_dict_has_the_keys_and_their_sums(trained):
    content = json.loads(json.dumps(trained.to_dict()))
    counts = {"raw_bytes", "stored_bytes", "host_bytes"}
    keys = counts | {"slot", "role", "codec", "shape", "bits", "sensitivity"}
    assert all(set(context) == keys for context in content["contexts"])
    for key in ("raw_bytes", "stored_bytes"):
        assert content[key] == sum(context[key] for context in content["contexts"]) > 0
    assert content["rate"] == pytest.approx(content["raw_bytes"] / content["stored_bytes"])
    assert content["average_bits"] == 3
    quantized = [c for c in content["contexts"] if c["codec"] == "quantize"]
    assert all(c["bits"] == 3 and c["sensitivity"] is None for c in quantized)
    assert {tuple(c["shape"]) for c in quantized} >= {(300, 32)}


def test_average_bits_weighs_by_elements():
    report = Report([row("a", bits=2, numel=300), row("b", bits=8, numel=100), row("c", bits=None)])
    assert report.average_bits == pytest.approx((2 * 300 + 8 * 100) / 400)


def test_text_names_slots_and_totals(trained):
    text = str(trained)
    assert "convs.1/lin/linear.input" in text
    assert format_bytes(trained.raw_bytes) in text
    assert f"({trained.rate:.1f}x less)" in text
    for name in ("slot", "role", "codec", "bits", "raw", "stored", "share", "quantize", "keep"):
        assert name in text


def test_more_contexts_than_the_table_shows():
    report = Report([row(f"layer{i}/mul.input", raw=1000 + i, stored=i) for i in range(25)])
    text = str(report)
    assert "5 smaller contexts" in text
    shown = [int(i) for i in re.findall(r"layer(\d+)/", text)]
    assert shown == [*range(24, 4, -1)]
    assert len(report.to_dict()["contexts"]) == 25
    shares = [float(s) for s in re.findall(r"([\d.]+)%", text)]
    assert shares[-1] == 100
    assert sum(shares[:-1]) == pytest.approx(100, abs=1.2)  # 21 numbers rounded to 0.1


def test_slots_with_markup_are_shown_as_they_are(tmp_path):
    slots = ["[red]a[/red]/mul.input", "costs_$a$/mul.input", "<a__to__b>/mul"]
    report = Report([row(slot) for slot in slots])
    assert all(slot in str(report) for slot in slots)
    report.plot(tmp_path / "a.svg")


def test_plot(trained, tmp_path):
    path = tmp_path / "report.png"
    trained.plot(path)
    assert path.read_bytes().startswith(b"\x89PNG")
    assert path.stat().st_size > 10_000
    trained.plot(str(tmp_path / "text.png"))


def test_plot_without_matplotlib(trained, monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(ImportError, match=r"Expected matplotlib .* pip install matplotlib"):
        trained.plot(tmp_path / "a.png")


def test_nothing_stored():
    report = Report([row("a", raw=0, stored=0)])
    assert report.rate is None
    assert "total" in str(report)


@pytest.mark.parametrize(
    ("count", "text"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1024, "1.0 KiB"),
        (1536, "1.5 KiB"),
        (2**20, "1.0 MiB"),
        (2**30, "1.00 GiB"),
        (5 * 2**40, "5120.00 GiB"),
    ],
)
def test_format_bytes(count, text):
    assert format_bytes(count) == text
