from __future__ import annotations

import sys
from itertools import combinations, pairwise
from pathlib import Path

import pytest
from experiments_samples import small_graph

from experiments import layer_bytes
from experiments.errors import ExperimentError
from experiments.layer_bytes import GROUPS, bars_of, draw, group_of, main
from gact_graph.report import Report, Row

MB = 10**6
E, N = 2_500_000, 170_000


def row(
    role: str, codec: str, raw: int, stored: int, shape: tuple[int, ...] = (E, 3), at: str = "1"
) -> Row:
    return Row(f"convs.{at}/x.input", role, codec, shape, 1, None, raw * MB, stored * MB)


def lossless() -> Report:
    return Report(
        [
            row("edge", "gather", 1900, 0, (E, 3, 64)),
            row("edge", "gather", 30, 0),
            row("edge", "keep", 60, 60, (E, 3, 1)),
            row("node", "keep", 130, 130, (N, 192)),
            row("node", "keep", 130, 130, (N, 3, 64)),
            row("mask", "mask", 30, 1),
            row("index", "index", 40, 20),
            row("node", "keep", 130, 130, (N, 192), at="10"),
            row("node", "keep", 130, 130, (N, 192), at="0"),
        ]
    )


def quantized() -> Report:
    return Report(
        [
            row("edge", "gather", 1900, 0, (E, 3, 64)),
            row("edge", "quantize", 90, 6, (E, 3, 1)),
            row("node", "quantize", 260, 33, (N, 3, 64)),
            row("mask", "mask", 30, 1),
            row("index", "index", 40, 20),
        ]
    )


def test_groups_tell_what_a_tensor_is() -> None:
    assert group_of(row("edge", "gather", 1, 0, (E, 3, 64))) == "x_j"
    assert group_of(row("edge", "gather", 1, 0, (E, 3))) == "attention"  # the sums of softmax
    assert group_of(row("edge", "quantize", 1, 1)) == "attention"
    assert group_of(row("mask", "mask", 1, 1)) == "masks"
    assert group_of(row("index", "keep", 1, 1)) == "indices"
    assert group_of(row("node", "quantize", 1, 1)) == "nodes"
    assert group_of(row("other", "drop", 1, 0)) == "other"


def test_bars_are_of_one_layer() -> None:
    bars = bars_of({"lossless": lossless(), "L1 4 bit": quantized()})
    assert {name: [size // MB for size in bar.values()] for name, bar in bars.items()} == {
        "stock": [1900, 260, 90, 40, 30, 0],
        "lossless": [0, 260, 60, 20, 1, 0],
        "L1 4 bit": [0, 33, 6, 20, 1, 0],
    }
    assert all(tuple(bar) == tuple(GROUPS) for bar in bars.values())


def test_drawing_has_every_segment_and_no_text_over_another() -> None:
    pytest.importorskip("matplotlib")
    bars = bars_of({"lossless": lossless(), "L1 4 bit": quantized(), "L1 2 bit": quantized()})
    figure = draw(bars, "title")
    upper, lower = figure.axes
    assert sum(patch.get_width() for patch in upper.patches) == pytest.approx(2320 + 341 + 60 + 60)
    texts = [text.get_text() for text in lower.texts]
    assert "gathered anew" in lower.get_xlabel() and "kept once" not in lower.get_xlabel()
    assert texts[:5] == ["260", "60", "20", "341 MB (masks 1)", "33"]
    assert "2,320 MB" in " ".join(text.get_text() for text in upper.texts)
    # Zero bytes leave no mark, neither here nor in the legend.
    (legend,) = figure.legends
    assert [text.get_text() for text in legend.texts] == [
        GROUPS[name][0] for name in GROUPS if name != "other"
    ]
    figure.draw_without_rendering()
    for axes in (upper, lower):
        right = axes.get_window_extent().x1
        boxes = [text.get_window_extent() for text in axes.texts]
        assert all(box.x1 <= right for box in boxes)
        assert not any(a.overlaps(b) for a, b in combinations(boxes, 2))


def test_indices_that_another_layer_holds_are_remarked() -> None:
    pytest.importorskip("matplotlib")
    report = Report([row("index", "index", 40, 0), row("node", "keep", 130, 130)])
    words = draw(bars_of({"lossless": report}), "title").axes[1].get_xlabel()
    assert "kept once" in words and "gathered anew" not in words


@pytest.mark.parametrize("sizes", [(0, 0), (1, 0), (10**12, 1)])
def test_draws_whatever_the_sizes(sizes: tuple[int, int]) -> None:
    pytest.importorskip("matplotlib")
    bars = {
        name: dict.fromkeys(GROUPS, 0) | {"nodes": size}
        for name, size in zip(("stock", "lossless"), sizes, strict=True)
    }
    assert len(draw(bars, "title").axes) == 2


def test_writes_a_picture_and_says_the_numbers(tmp_path: Path, monkeypatch, capsys) -> None:
    pytest.importorskip("matplotlib")
    monkeypatch.setattr(layer_bytes, "load", lambda spec, root: small_graph())
    out = tmp_path / "docs" / "layer.png"
    assert main(["--bits", "4", "--out", str(out)]) == 0
    assert out.read_bytes().startswith(b"\x89PNG")
    lines = capsys.readouterr().out.splitlines()
    assert [line.split(":")[0] for line in lines] == ["stock", "lossless", "L1 4 bit"]
    totals = [float(line.split(": ")[1].split(" MB")[0]) for line in lines]
    assert all(a >= b for a, b in pairwise(totals)) and totals[0] > totals[2] > 0


def test_missing_matplotlib_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(ExperimentError, match=r'pip install "gact_graph\[experiments\]"'):
        draw({"stock": {}, "lossless": {}}, "title")


@pytest.mark.parametrize(
    ("line", "code", "words"),
    [
        ("--dataset digits", 2, "--out"),
        ("--out a.png --bits 0", 2, "Expected widths from low to high, 1 to 16"),
        ("--out a.png --dataset nosuch", 1, "nosuch"),
    ],
)
def test_mistakes_end_in_one_line(line: str, code: int, words: str, capsys) -> None:
    assert main(line.split()) == code
    text = capsys.readouterr().err
    assert text.startswith("layer_bytes: ") and words in text
    assert text.count("\n") == 1
