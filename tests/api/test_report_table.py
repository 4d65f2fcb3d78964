"""The table: names at any width, groups, rows by layer; and its form in a notebook."""

import dataclasses
import io
import re
from html.parser import HTMLParser

import pytest
from report_rows import row
from rich.console import Console
from samples import GraphNet, graph, make, train_step

import gact_graph
from gact_graph.api.report import Report
from gact_graph.api.report.contexts import by_layer
from gact_graph.api.report.names import layer_of, shorten
from gact_graph.support.rows import LayerRow

LONG = "convs.{}/convs.<author___writes_very_often___paper>/{}/linear.input"
WIDTHS = (60, 80, 120, 200)


def deep(layers=64):
    """As a GCNII: every layer has a conv and a norm, and one module is called again and again."""
    rows = []
    for i in range(layers):
        rows += [row(f"convs.{i}/addmm.input", 10**6, 10**5)]
        rows += [row(f"norms.{i}/batch_norm.input", 10**6, 10**5)]
        rows += [row(f"relu/relu#{i}.result", 2 * 10**6, 10**4, role="mask")]
    return Report(rows)


def hetero():
    slots = [LONG.format(i, lin) for i in range(3) for lin in ("lin_l", "lin_r")]
    return Report([row(slot, sensitivity=0.25) for slot in slots])


def printed(report, width):
    text = io.StringIO()
    Console(file=text, width=width).print(report)
    return text.getvalue().splitlines()


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("by", ["slot", "layer"])
@pytest.mark.parametrize("report", [deep(), hetero()], ids=["deep", "hetero"])
def test_no_line_is_too_long_and_no_name_is_folded(report, by, width):
    report = dataclasses.replace(report, by=by)
    lines = printed(report, width)
    assert max(map(len, lines)) <= width
    names = {row.slot for row in report.contexts} | {
        layer.label for layer in by_layer(report.contexts)
    }
    body = [line for line in lines[3:-3] if "smaller contexts" not in line]
    assert len(body) >= 3
    for line in body:
        shown = line.split()[0]
        # The name as it is, or its end from where one of its parts begins.
        ends = [name for name in names if name.endswith(shown.removeprefix("…"))]
        assert ends, line
        if shown.startswith("…"):
            cut = [name[: len(name) - len(shown) + 1] for name in ends]
            assert shown[1] == "/" or all(part.endswith((".", "___")) for part in cut), line
        assert "KiB" in line or " B" in line, line


@pytest.mark.parametrize("width", WIDTHS)
def test_bytes_are_shown_at_every_width(width):
    text = "\n".join(printed(hetero(), width))
    assert "raw" in text and "stored" in text and "1000 B" in text
    assert ("role" in text) == (width >= 120)


def test_a_wide_terminal_shows_whole_names():
    text = "\n".join(printed(hetero(), 200))
    assert "…" not in text
    assert LONG.format(1, "lin_r") in text


def test_contexts_of_a_layer_stand_below_its_sum():
    report = Report(
        [
            row("convs.0/lin/linear.input", 3000, 300),
            row("convs.1/lin/linear.input", 5000, 500),
            row("convs.0/mul.input", 4000, 400),
            row("relu.result", 10, 1),
        ]
    )
    shown = [re.split(r"\s{2,}", line.strip())[0] for line in printed(report, 120)[3:-3]]
    assert shown == [
        "convs.1/lin/linear.input",
        "convs.0",
        "convs.0/mul.input",
        "convs.0/lin/linear.input",
        "relu.result",
    ]
    (head,) = [line for line in printed(report, 120) if line.startswith("convs.0 ")]
    assert "6.8 KiB" in head and "700 B" in head


def test_the_sum_of_a_layer_counts_contexts_that_are_not_shown():
    lines = printed(deep(), 120)
    (head,) = [line for line in lines if line.startswith("relu ")]
    assert "122.1 MiB" in head  # 64 x 2e6 bytes, of which 20 have rows
    assert any("172 smaller contexts" in line for line in lines)


def test_numbers_agree_with_their_nouns():
    rows = [row(f"relu#{i}.result", 10, 1) for i in range(21)]
    layers = [LayerRow("conv/propagate", "blocks", 1, None, True)]
    text = "\n".join(printed(Report(rows, layers=layers), 120))
    assert "1 smaller context " in text
    assert "1 call of message passing in 1 block" in text and "sorting edges" not in text
    timed = Report(rows, layers=layers, order_seconds=0.5, order_bytes=2**20)
    assert "1 block; sorting edges took 0.50 s so far, 1.0 MiB" in "\n".join(printed(timed, 120))


def test_a_row_a_layer_in_the_order_of_forward():
    model = gact_graph.wrap(make(lambda: GraphNet("gat")), bits=3, min_bytes=0)
    train_step(model, *graph())
    report = gact_graph.report(model, by="layer")
    assert report.to_dict()["contexts"] == gact_graph.report(model).to_dict()["contexts"]
    # What the step cost stands below the table.
    report = dataclasses.replace(report, forward_seconds=None, peak_bytes=None)
    lines = printed(report, 100)
    lines = lines[: next(i for i, line in enumerate(lines) if "saved for backward" in line) + 1]
    assert lines[1].split() == ["layer", "contexts", "bits", "raw", "stored", "share"]
    names = [line.split()[0] for line in lines[3:-3]]
    assert [n for n in names if n != "(model)"] == ["convs.0", "norm", "convs.1"]
    counts = [int(line.split()[1]) for line in lines[3:-3]]
    assert sum(counts) == len(report.contexts)
    assert lines[-2].split()[:2] == ["total", str(len(report.contexts))]


def test_other_groups_are_refused():
    model = gact_graph.wrap(make(lambda: GraphNet("gcn")), min_bytes=0)
    with pytest.raises(ValueError, match=r"Expected by to be 'slot' or 'layer' \(got 'role'\)"):
        gact_graph.report(model, by="role")


@pytest.mark.parametrize(
    ("slot", "layer"),
    [
        ("relu.result", ""),
        ("lin/linear.input", "lin"),
        ("convs.1/lin/linear.input", "convs.1"),
        ("convs.12/edge_update/softmax.exp.result", "convs.12"),
        ("conv1/nn.0/linear.input", "conv1"),
        ("conv1.author__writes__paper/lin_l/linear.input", "conv1"),
        ("convs.0/convs.<a___to___b>/lin_l/linear.input", "convs.0"),
        ("module/encoder/conv2/linear.input", "module/encoder/conv2"),
        ("encoder/lin/linear.input", "encoder"),
    ],
)
def test_layer_of_a_slot(slot, layer):
    assert layer_of(slot) == layer


@pytest.mark.parametrize(
    ("width", "text"),
    [
        (24, "convs.1/lin/linear.input"),
        (23, "…/lin/linear.input"),
        (17, "…/linear.input"),
        (13, "…input"),
        (5, "…nput"),
        (1, "…"),
    ],
)
def test_shorten(width, text):
    assert shorten("convs.1/lin/linear.input", width) == text


def test_shorten_keeps_the_end_of_a_relation():
    assert shorten("convs.<author___writes___paper>/mul.input", 30) == "…writes___paper>/mul.input"


class Cells(HTMLParser):
    """The texts of a table's cells, row by row; and every tag."""

    def __init__(self):
        super().__init__()
        self.rows, self.tags = [], []

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))
        if tag == "tr":
            self.rows.append([])
        elif tag in ("td", "th"):
            self.rows[-1].append("")

    def handle_data(self, data):
        if self.rows and self.rows[-1]:
            self.rows[-1][-1] += data.strip()


def test_a_notebook_shows_the_table():
    bad = "convs.0/<img src=x onerror=alert(1)>/mul.input"
    cells = Cells()
    cells.feed(Report([row(bad, 3000), row("convs.1/mul.input")])._repr_html_())
    assert cells.rows[0] == ["slot", "role", "codec", "bits", "raw", "stored", "share"]
    assert cells.rows[1][0] == bad
    assert cells.rows[2][0] == "convs.1/mul.input"
    assert cells.rows[-1][0] == "total"
    assert {tag for tag, _ in cells.tags}.isdisjoint({"img", "script", "style"})
    # Letters and ground are the notebook's own, which may be light or dark.
    assert not any(
        re.search(r"(^|[ ;])(color|background)", a.get("style", ""))
        for tag, a in cells.tags
        if tag != "i"  # the marks of a legend
    )


def test_a_notebook_shows_layers_and_remarks():
    report = dataclasses.replace(deep(), by="layer", spared_below=2**20)
    cells = Cells()
    cells.feed(report._repr_html_())
    assert len(cells.rows) == 1 + 64 + 64 + 1 + 1
    assert "min_bytes=0 encodes all" in report._repr_html_()


def test_a_notebook_shows_an_empty_report():
    assert "No forward was compressed yet" in Report(empty=True)._repr_html_()


def test_a_notebook_draws_the_bytes_over_the_step():
    html = Report([row("a.0/b", 3000, 300), row("a.1/b", 1000, 100)])._repr_html_()
    stock, now = (points.split() for points in re.findall(r'points="([^"]*)"', html))
    assert stock[1:-1] == ["0.0000,1.0000", *stock[2:-2], "1.0000,1.0000"] and len(stock) == 7
    assert stock[3] == "0.5000,0.0000" and now[3] == "0.5000,0.9000"
    assert "stock, at most 3.9 KiB" in html and "forward" in html
    assert "<svg" not in Report([])._repr_html_()
