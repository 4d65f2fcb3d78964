"""Tables with bars and curves, of plans and estimates, in terminals and as HTML."""

import io
import itertools
import re
import sys

import pytest
from rich.console import Console

import gact_graph
from gact_graph.api.budget.estimate import STOCK, Cost, Estimate, Line, Peak, Strategy
from gact_graph.api.budget.miniature import GraphSize
from gact_graph.api.budget.plan import PlannedTensor
from gact_graph.api.report.curves import Curve, plot
from gact_graph.capture.places import Places

MIB = 2**20
SLOTS = ("convs.0/lin/linear.input", "norms.0/batch_norm.input")


def step(*sizes: float) -> list[Peak]:
    """Forward saves two tensors, backward releases them in reverse, and the step ends."""
    ends = [(SLOTS[0], False), (SLOTS[1], False), (SLOTS[1], True), (SLOTS[0], True), ("", True)]
    return [Peak(*end, Line(0.0, size * MIB)) for end, size in zip(ends, sizes, strict=True)]


def plan(memory: int = 9 * MIB, choice: str = "4 bits") -> gact_graph.Plan:
    tensors = [
        PlannedTensor(SLOTS[0], choice, 4 * MIB, MIB, 0.01, 0.002),
        PlannedTensor(SLOTS[1], "exact", 2 * MIB, 2 * MIB, 0.0, 0.0),
    ]
    return gact_graph.Plan(
        strategy=Strategy("L1", 4),
        memory=memory,
        nodes=1000,
        edges=5000,
        error=0.01,
        seconds=0.5,
        tensors=tensors,
        peaks=[*step(1, 2, 8, 2, 1), *step(1, 4, 4, 4, 1)],  # the first measures sensitivities
        stock_peaks=step(4, 16, 12, 8, 2),
        standing=0,
        places=Places(),
        model={},
    )


def estimate(memory: int | None = 10 * MIB) -> Estimate:
    costs = {STOCK: Cost(step(4, 16, 12, 8, 2), Line(0.0, 6.0 * MIB), 0.0)}
    for bits, error in ((8, 0.0001), (4, 0.01), (2, None)):
        costs[Strategy("L1", bits)] = Cost(step(1, 2, bits, 1, 1), Line(0.0, bits * MIB), error)
    return Estimate(costs, GraphSize(1000, 5000), memory)


def printed(shown: object, width: int, encoding: str = "utf-8") -> list[str]:
    raw = io.BytesIO()
    text = io.TextIOWrapper(raw, encoding=encoding, errors="strict")
    Console(file=text, width=width).print(shown)
    text.flush()
    return raw.getvalue().decode(encoding).splitlines()


@pytest.mark.parametrize(
    ("width", "encoding"),
    [*itertools.product((30, 60, 80, 140), ("utf-8", "ascii"))],
)
@pytest.mark.parametrize(
    "shown", [plan(), estimate(), estimate(None)], ids=["plan", "estimate", "no budget"]
)
def test_any_terminal_shows_them(shown: object, width: int, encoding: str) -> None:
    lines = printed(shown, width, encoding)
    assert max(map(len, lines)) <= width
    assert any("stock" in line for line in lines)


def test_a_plan_is_a_table_by_layer() -> None:
    lines = [" ".join(line.split()) for line in printed(plan(), 100)]
    assert "layer tensors stock planned time error" in lines
    assert "convs.0 4 bits (1) 4.0 MiB 1.0 MiB 2.0 ms 10 %" in lines
    assert "norms.0 exact (1) 2.0 MiB 2.0 MiB" in lines
    assert "total 6.0 MiB 3.0 MiB 2.0 ms 10 %" in lines


def test_a_curve_shows_one_step_where_two_are_planned() -> None:
    assert plan().curve == [MIB, 4 * MIB, 8 * MIB, 4 * MIB, MIB]
    assert plan().stock_curve == [4 * MIB, 16 * MIB, 12 * MIB, 8 * MIB, 2 * MIB]
    assert plan().peak_bytes == 8 * MIB


def columns(lines: list[str]) -> list[str]:
    """The columns of a plot, from the bottom, without labels."""
    rows = [line[9:] for line in lines]
    return ["".join(row.ljust(len(rows[0]))[i] for row in rows[::-1]) for i in range(len(rows[0]))]


def test_a_terminal_shows_memory_over_the_step_beside_that_of_stock() -> None:
    lines = printed(plan(), 60)
    at = next(i for i, line in enumerate(lines) if line.startswith("16.0 MiB"))
    heights = [len(column.rstrip(" ┄")) for column in columns(lines[at : at + 8])]
    # 16 MiB are 8 rows; forward has the left half.
    assert heights[0] == 2 and max(heights) == 8
    assert heights.index(8) == pytest.approx(len(heights) / 4, abs=2)
    assert sum(column.count("█") for column in columns(lines[at : at + 8])) > 0
    assert "┄" in lines[at + 3] and "┄" not in lines[at]  # the budget of 9 MiB
    assert lines[at + 8].split() == ["forward", "backward"]
    assert lines[at + 9].split() == ["░░", "stock", "██", "planned", "┄┄", "budget"]


def test_a_budget_far_above_does_not_flatten_the_curves() -> None:
    text = "\n".join(printed(plan(memory=2**30), 60))
    assert "┄" not in text and "16.0 MiB" in text


def test_a_peak_is_seen_at_any_width() -> None:
    curve = Curve("stock", "stock", [(0.0, 1), (0.500, 1), (0.501, 80), (0.502, 1), (1.0, 1)])
    assert max(curve.sampled(8)) == max(curve.sampled(1000)) == 80
    assert curve.sampled(4) == [1, 1, 80, 1]
    assert len([*plot([curve, curve], 0, 20, False)]) == 10


def test_an_estimate_shows_memory_and_error_as_bars() -> None:
    lines = printed(estimate(), 100)
    bars = {line[:10].strip(): re.findall("[━╸]+", line) for line in lines[3:]}
    assert len(bars["stock"][0]) > len(bars["L1, 8 bits"][0]) > len(bars["L1, 4 bits"][0])
    assert len(bars["L1, 8 bits"][1]) < len(bars["L1, 4 bits"][1])
    cells = {line[:10].strip(): line.split() for line in lines}
    assert "10" in cells["L1, 4 bits"] and cells["L1, 4 bits"][-1] == "yes"
    assert "%" not in cells["L1, 2 bits"]  # nothing was measured
    assert estimate().to_dict()["strategies"][2]["error"] == 0.01


def test_bars_and_then_columns_are_left_out_of_a_narrow_terminal() -> None:
    wide, narrow, least = ("\n".join(printed(estimate(), width)) for width in (100, 52, 40))
    assert "━" in wide and "saved" in wide
    assert "━" not in narrow and "saved" in narrow
    assert "saved" not in least and "error" in least


@pytest.mark.parametrize("shown", [plan(), estimate()], ids=["plan", "estimate"])
def test_a_page_has_no_script_and_loads_nothing(shown, tmp_path, monkeypatch) -> None:
    for name in ("plotly.offline", "matplotlib.figure"):
        monkeypatch.setitem(sys.modules, name, None)
    shown.save(tmp_path / "page.html")
    page = (tmp_path / "page.html").read_text(encoding="utf-8")
    assert page.startswith("<!doctype html>") and shown._repr_html_() in page
    assert not re.search(r"<(script|link|img|iframe)|\bsrc=|url\(|@import|https?://", page)
    assert "1,000 nodes" in page and "stock" in page and "10 %" in page


def test_a_notebook_draws_curves_within_their_frame() -> None:
    html = plan()._repr_html_()
    polygons = re.findall(r'points="([^"]*)"', html)
    assert len(polygons) == 2
    for polygon in polygons:
        points = [tuple(map(float, point.split(","))) for point in polygon.split()]
        assert all(0 <= x <= 1 and 0 <= y <= 1 for x, y in points)
        assert [x for x, _ in points] == sorted(x for x, _ in points)
    assert min(y for _, y in points) == 0.5  # 8 of 16 MiB
    assert "stroke-dasharray" in html
    assert "stroke-dasharray" not in plan(memory=2**30)._repr_html_()


def test_names_cannot_break_out_of_a_page() -> None:
    html = plan(choice="<script>alert(1)</script>")._repr_html_()
    assert "<script>" not in html and "&lt;script&gt;" in html


def test_other_files_are_refused(tmp_path) -> None:
    with pytest.raises(ValueError, match=r"ends in \.html \(got 'a\.png'\)$"):
        estimate().save(tmp_path / "a.png")
    with pytest.raises(FileNotFoundError, match="Expected a folder that exists"):
        plan().save(tmp_path / "nowhere" / "plan.html")
