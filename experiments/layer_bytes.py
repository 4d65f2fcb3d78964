"""A picture of where the bytes of one GATConv layer go, at each level.

``python -m experiments.layer_bytes --dataset FILE.npz --out docs/gat_layer.png``

The layer is the hidden, second one of the GAT of :mod:`experiments.subjects`, 3 heads of 64. Its
saved tensors are grouped by what they are; a group has one color in all bars.
"""

from __future__ import annotations

import argparse
import io
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from datasets import load
from experiments.atomic import write_atomically
from experiments.data import prepare
from experiments.display import make_console, say
from experiments.errors import ExperimentError, ResultsError
from experiments.kernels import parse_widths
from experiments.options import Parser
from experiments.rates import accounts
from experiments.subjects import SUBJECTS, add_graph_flags, exit_code, label
from experiments.summary import dataset_name
from experiments.values import parse_device
from gact_graph.report import Report, Row

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_SUBJECT = "gat"
_PREFIX = "convs.1/"
_STOCK = "stock"

# Name, color, color of text on it. The colors are Okabe and Ito's, told apart by all eyes.
GROUPS = {
    "x_j": ("gathered neighbour features $x_j$", "#D55E00", "white"),
    "nodes": ("node tensors", "#0072B2", "white"),
    "attention": ("attention coefficients", "#E69F00", "black"),
    "indices": ("indices", "#009E73", "white"),
    "masks": ("masks (only signs are read)", "#CC79A7", "black"),
    "other": ("other", "#999999", "black"),
}
_GROUP_OF_ROLE = {"node": "nodes", "edge": "attention", "index": "indices", "mask": "masks"}

_REMARKS = {
    "x_j": "$x_j$: gathered anew in backward, from a node tensor and the indices",
    "indices": "indices: the same in every layer, so they are kept once, with the first layer",
}

_FONT = 9  # points
_PAD = 4  # pixels of room on either side of a text

Bars = Mapping[str, Mapping[str, int]]
"""Bytes of each group of each bar, from the top down."""


def main(argv: list[str] | None = None) -> int:
    """Count the bytes and draw them; return the exit code as the main job does."""
    return exit_code("layer_bytes", lambda: _run(argv))


def group_of(row: Row) -> str:
    """Return the name in :data:`GROUPS` of what the context is."""
    # Arcs x heads x channels; the sums of the softmax are gathered, too: arcs x heads.
    if row.codec == "gather" and len(row.shape) == 3:
        return "x_j"
    return _GROUP_OF_ROLE.get(row.role, "other")


def bars_of(reports: Mapping[str, Report], prefix: str = _PREFIX) -> Bars:
    """Return the bars: stock, and one a report; only of slots that start with ``prefix``.

    What a tensor is, only the codecs tell, so stock's bytes are grouped as in the first report.
    """
    rows = {
        name: [row for row in report.contexts if row.slot.startswith(prefix)]
        for name, report in reports.items()
    }
    first = next(iter(rows.values()))
    bars = {_STOCK: _sums((group_of(row), row.raw_bytes) for row in first)}
    for name, found in rows.items():
        bars[name] = _sums((group_of(row), row.stored_bytes) for row in found)
    return bars


def draw(bars: Bars, title: str) -> Figure:
    """Draw all bars on one axis, and below it all but the first, enlarged."""
    figure = _figure(len(bars))
    heights = [len(bars), len(bars) - 1]
    upper, lower = figure.subplots(2, 1, height_ratios=heights)
    small = dict(list(bars.items())[1:])
    for axes, shown in ((upper, bars), (lower, small)):
        axes.set_yticks(range(len(shown)), shown)
        axes.set_ylim(len(shown) - 0.5, -0.5)
        axes.spines[["top", "right", "left"]].set_visible(False)
        axes.tick_params(axis="y", length=0)
        axes.xaxis.set_major_formatter("{x:,g}")
        # Room for tick labels is made before the real limits are known.
        axes.set_xlim(0, _limit(shown))
    lines = ["MB held from forward to backward ($10^6$ bytes)", *_remarks(bars)]
    lower.set_xlabel("\n".join(lines), fontsize=_FONT)
    lower.set_title("the same, enlarged", loc="left", fontsize=_FONT)
    figure.suptitle(title, fontsize=_FONT + 2)
    used = [name for name in GROUPS if any(bar.get(name) for bar in bars.values())]
    figure.legend(
        handles=[_patch(*GROUPS[name][:2]) for name in used],
        loc="outside lower center",
        ncols=3,
        frameon=False,
        fontsize=_FONT,
    )
    figure.draw_without_rendering()  # places the axes
    _fill(upper, bars, itemized=[next(iter(bars))])
    _fill(lower, small, itemized=list(small))
    return figure


def _sums(pairs: Any) -> dict[str, int]:
    sums = dict.fromkeys(GROUPS, 0)
    for group, size in pairs:
        sums[group] += size
    return sums


def _remarks(bars: Bars) -> list[str]:
    """What became of groups that stock holds and the second bar does not."""
    stock, exact = list(bars.values())[:2]
    gone = [group for group in GROUPS if stock.get(group) and not exact.get(group)]
    return [_REMARKS[group] for group in gone if group in _REMARKS]


def _limit(bars: Bars) -> float:
    return max([sum(bar.values()) / 1e6 for bar in bars.values()] + [1e-6])


def _fill(axes: Axes, bars: Bars, itemized: Sequence[str]) -> None:
    """Draw the bars and their texts, on a scale that leaves room for what follows each bar."""
    pixels = axes.get_window_extent().width
    limit = _limit(bars)
    while True:
        scale = pixels / limit
        ends = {name: _end(axes, bar, scale, name in itemized) for name, bar in bars.items()}
        needed = (
            sum(bar.values()) / 1e6 * scale + _width(axes, ends[name]) for name, bar in bars.items()
        )
        if max(needed) <= pixels or limit > 100 * _limit(bars):
            break
        limit *= 1.02
    axes.set_xlim(0, limit)
    for place, (name, bar) in enumerate(bars.items()):
        left = 0.0
        for group, size in bar.items():
            width = size / 1e6
            _, color, ink = GROUPS[group]
            axes.barh(place, width, left=left, height=0.7, color=color)
            if _fits(axes, size, scale):
                _text(axes, left + width / 2, place, _mb(size), ha="center", color=ink)
            left += width
        _text(axes, left + _PAD / scale, place, ends[name], ha="left", color="black")


def _end(axes: Axes, bar: Mapping[str, int], scale: float, itemized: bool) -> str:
    """The text after a bar: the sum, and the groups that are too narrow for a text of their own."""
    total = f"{_mb(sum(bar.values()))} MB"
    if not itemized:
        return total
    narrow = [
        f"{group} {_mb(size)}"
        for group, size in bar.items()
        if size and not _fits(axes, size, scale)
    ]
    return f"{total} ({', '.join(narrow)})" if narrow else total


def _fits(axes: Axes, size: int, scale: float) -> bool:
    return size > 0 and size / 1e6 * scale >= _width(axes, _mb(size))


def _width(axes: Axes, text: str) -> float:
    """Pixels that a text takes, with some room on both sides."""
    from matplotlib.font_manager import FontProperties

    canvas: Any = axes.figure.canvas
    renderer = canvas.get_renderer()
    width, _, _ = renderer.get_text_width_height_descent(text, FontProperties(size=_FONT), False)
    return float(width) + 2 * _PAD


def _text(axes: Axes, x: float, y: float, text: str, ha: str, color: str) -> None:
    made = axes.text(x, y, text, ha=ha, va="center_baseline", color=color, fontsize=_FONT)
    made.set_in_layout(False)


def _mb(size: int) -> str:
    value = size / 1e6
    return f"{value:,.0f}" if value >= 9.95 else f"{value:.2g}"


def _figure(bars: int) -> Figure:
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError:
        raise ExperimentError(
            'Expected matplotlib for the picture (got none): pip install "gact_graph[experiments]"'
        ) from None
    # A Figure of its own, not pyplot's: no display, no state shared with anybody.
    figure = Figure(figsize=(9, 2.3 + 0.62 * bars), dpi=150, layout="constrained")
    FigureCanvasAgg(figure)  # measures texts
    return figure


def _patch(name: str, color: str) -> Any:
    from matplotlib.patches import Patch

    return Patch(color=color, label=name)


def _run(argv: list[str] | None) -> None:
    args = _parse(argv)
    _figure(1)  # fails before the work instead of after it
    subject = SUBJECTS[_SUBJECT]
    task = prepare(load(args.dataset, args.data_root), subject.layout, device=args.device)
    levels = [("lossless", 32), *(("L1", bits) for bits in args.bits)]
    reports = accounts(_SUBJECT, task, levels)
    bars = bars_of({label(*pair): report for pair, report in reports.items()})
    nodes, arcs = task.x.size(0), task.adjacency.size(1)
    title = (
        "What one GATConv layer (3 heads x 64) saves for backward\n"
        f"{dataset_name(args.dataset)}: {nodes:,} nodes, {arcs:,} arcs"
    )
    picture = io.BytesIO()
    draw(bars, title).savefig(picture, format="png")
    _make_folder(args.out.parent)
    write_atomically(args.out, picture.getvalue())
    console = make_console()
    for name, bar in bars.items():
        parts = ", ".join(f"{group} {_mb(size)}" for group, size in bar.items() if size)
        say(console, f"{name}: {_mb(sum(bar.values()))} MB ({parts})")


def _make_folder(folder: Path) -> None:
    try:
        folder.mkdir(exist_ok=True)
    except OSError as error:
        raise ResultsError(f"Expected to be able to write into {folder} (got {error})") from None


def _parse(argv: list[str] | None) -> argparse.Namespace:
    parser = Parser(prog="python -m experiments.layer_bytes", description=__doc__.splitlines()[0])
    add_graph_flags(parser)
    parser.add_argument("--bits", type=parse_widths, default="4,2", help="of L1 (default: 4,2)")
    parser.add_argument("--out", type=Path, required=True, metavar="FILE.png")
    args = parser.parse_args(argv)
    args.device = parse_device(args.device)
    return args


if __name__ == "__main__":
    sys.exit(main())
