"""The pictures of the pages: drawings of results, and dark versions of all light pictures."""

from __future__ import annotations

import io
import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator

from experiments.helpers import codes
from experiments.helpers.errors import ResultsError
from experiments.helpers.network_model import modelled
from experiments.helpers.noise import squared_error

# Colors of light pictures, and their counterparts on a dark page.
_DARK = {
    "#24292f": "#e6edf3",
    "#57606a": "#9ea7b3",
    "#8c959f": "#768390",
    "#d8dee4": "#3d444d",
    "#d55e00": "#ff8c3a",
    "#f6f8fa": "#21262d",
    "#dbeafe": "#1b2f4b",
    "#ffe8d6": "#4a2c14",
    "#dcf5e4": "#17361f",
}

_TITLE = re.compile("<title>.*</title>")

_STYLE: Any = {
    **dict.fromkeys(("text.color", "axes.labelcolor", "xtick.color", "ytick.color"), "#24292f"),
    **dict.fromkeys(("axes.edgecolor", "grid.color"), "#d8dee4"),
    **{"svg.fonttype": "none", "svg.hashsalt": "gact_graph", "font.size": 9},
    **{"axes.spines.top": False, "axes.spines.right": False, "axes.titlesize": "medium"},
}
_COLORS = ("#8c959f", "#d55e00")

Points = Sequence[tuple[int, float]]


def pictures(root: Path) -> dict[Path, str]:
    """Return each picture's text by its path: those from results/, and the dark ones."""
    folder, results = root / "docs" / "images", root / "results"
    light = {path: path.read_text(encoding="utf-8") for path in sorted(folder.glob("*-light.svg"))}
    drawn: dict[Path, str] = {}
    partition = results / "partition" / "gat.json"
    if partition.exists():
        content = json.loads(partition.read_text(encoding="utf-8"))
        drawn[folder / "partition-light.svg"] = draw_partition(content)
    if found := _contents(results / "codes"):
        drawn[folder / "codes-light.svg"] = draw_codes(found)
    if found := _contents(results / "plan_ways"):
        drawn[folder / "plans-light.svg"] = draw_plans([w for file in found for w in file["ways"]])
    for path, text in drawn.items():
        # The title has the numbers; the rest differs between versions of matplotlib.
        if path in light and _TITLE.findall(light[path]) == _TITLE.findall(text):
            drawn[path] = light[path]
    dark = {
        path.with_name(path.name.replace("-light", "-dark")): _darkened(text)
        for path, text in (light | drawn).items()
    }
    return drawn | dark


def _contents(folder: Path) -> list[dict[str, Any]]:
    """Return the results of a folder, in the order of the names of its files."""
    return [json.loads(path.read_text("utf-8")) for path in sorted(folder.glob("*.json"))]


def _darkened(svg: str) -> str:
    """Replace all colors by dark ones.

    Raises:
        ResultsError: If the picture has a color without a dark one.
    """

    def dark(match: re.Match[str]) -> str:
        if match[0] not in _DARK:
            raise ResultsError(
                f"Expected pictures in the colors {', '.join(_DARK)} (got {match[0]})"
            )
        return _DARK[match[0]]

    return re.sub(r"#[0-9a-f]{6}\b", dark, svg)


def draw_partition(content: Mapping[str, Any]) -> str:
    """Draw the results of ``experiments.partition`` with two ways and two widths of the halo.

    Two panels: the peak of a process, measured; the bytes that a process sends in a step, measured
    and counted.
    """
    ways = list(dict.fromkeys(run["way"] for run in content["runs"]))[: len(_COLORS)]
    peaks = {way: _measured(content, "peak_bytes", way, 32) for way in ways}
    sent, counted = {}, {}
    for bits in content["halo_bits"][: len(_COLORS)]:
        name = f"halo in {bits} bits"
        sent[name] = [p for p in _measured(content, "sent_bytes", ways[-1], bits) if p[0] > 1]
        counted[name] = [*sent[name][-1:], *_counted(content, ways[-1], bits)]
    title = [f"{way} peaks at {line[-1][1]:,.0f} MB" for way, line in peaks.items()]
    title += [f"{name}: {line[-1][1]:,.1f} MB sent" for name, line in sent.items() if line]
    with matplotlib.rc_context(_STYLE):
        figure = Figure(figsize=(7.6, 3.2), layout="constrained")
        panels = figure.subplots(1, 2)
        _panel(panels[0], "peak of a process, MB", peaks, {})
        _panel(panels[1], "sent by a process in a step, MB (dashed: counted)", sent, counted)
        return _svg(figure, title)


def draw_codes(contents: Sequence[Mapping[str, Any]]) -> str:
    """Draw saved bytes and the gradient's error: the library as a line by bits, peers as points;
    one panel per network."""
    title = []
    with matplotlib.rc_context(_STYLE):
        figure = Figure(figsize=(3.8 * len(contents), 3.6), layout="constrained")
        panels = figure.subplots(1, len(contents), squeeze=False)[0]
        for axes, content in zip(panels, contents, strict=True):
            rows = codes.rows_of(content)
            line = [(row["saved_bytes"] / 1e6, squared_error(row)) for row in rows.values()]
            axes.plot(*zip(*line, strict=True), "o-", color=_COLORS[1], markersize=4)
            for bits, point in zip(rows, line, strict=True):
                beside = {"xytext": (5, 2), "color": _COLORS[1]}
                axes.annotate(str(bits), point, textcoords="offset points", **beside)
                title.append(f"{bits} bit: {point[0]:.2f} MB, {point[1]:.2g}")
            for row in codes.peer_rows(content):
                point = row["saved_bytes"] / 1e6, squared_error(row)
                axes.plot(*point, "D", color="#57606a", markersize=4, fillstyle="none")
                beside = {"xytext": (-6, 0), "ha": "right", "va": "center", "color": "#57606a"}
                name = f"{codes.NAMES[row['variant']]}, {row['bits']} bit"
                axes.annotate(name, point, textcoords="offset points", **beside)
                title.append(f"{name}: {point[0]:.2f} MB, {point[1]:.2g}")
            axes.set(xscale="log", yscale="log", title=codes.title_of(content))
            # Larger errors leave no gradient: that of GACT on GAT at 1 bit has an error of 10^22.
            axes.set(xlabel="saved for backward, MB", ylim=(None, min(axes.get_ylim()[1], 100)))
            axes.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
            axes.xaxis.set_major_formatter("{x:g}")
            axes.minorticks_off()
            axes.grid()
        figure.axes[0].set_ylabel("squared error of the gradient")
        return _svg(figure, title)


def draw_plans(rows: Sequence[Mapping[str, Any]]) -> str:
    """Draw time and error by peak memory: plans as a line, other ways to train as points.

    One row of two panels for each network and graph.

    Args:
        rows: The ``ways`` of ``experiments.plans``; those of plans are budgets in bytes.
    """
    subjects: dict[tuple[str, str], list[Mapping[str, Any]]] = {}
    for row in rows:
        if row["peak"] is not None:
            subjects.setdefault((row["model"], row["dataset"]), []).append(row)
    title = []
    with matplotlib.rc_context(_STYLE):
        figure = Figure(figsize=(8.4, 4.2 * len(subjects)), layout="constrained")
        grid = figure.subplots(len(subjects), 2, squeeze=False)
        for panels, ((model, graph), found) in zip(grid, subjects.items(), strict=True):
            for axes, measure in zip(panels, ("seconds", "error"), strict=True):
                _ways(axes, found, measure)
                axes.set(xscale="log", xlabel="peak of a step, MB")
                axes.margins(x=0.3)  # for the names
                axes.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
                axes.xaxis.set_major_formatter("{x:g}")
                axes.minorticks_off()
                axes.grid()
            panels[0].set(title=f"{model}, {graph.removesuffix('.npz')}: s/step", ylim=(0, None))
            panels[1].set(title="error of the gradient, as a share of its length", yscale="log")
            for row in found:
                name = _name_of_way(row["way"])
                title.append(f"{name} {row['peak'] / 1e6:,.0f} MB {row['seconds']:.2f} s")
        grid[0][0].legend(frameon=False, loc="lower right")
        return _svg(figure, title)


def _ways(axes: Any, rows: Sequence[Mapping[str, Any]], measure: str) -> None:
    """Draw the ways to train of one network and graph."""
    # Other ways are exact; those whose dropout draws other noise have another gradient.
    with_codes = (row for row in rows if row["error"] and _may_quantize(row["way"]))
    shown = [*rows] if measure == "seconds" else [*with_codes]
    plans = sorted(
        (row["peak"] / 1e6, row[measure]) for row in shown if isinstance(row["way"], int)
    )
    if plans:
        axes.plot(*zip(*plans, strict=True), "o-", color=_COLORS[1], markersize=4, label="plans")
    others = sorted(
        (row[measure], row["peak"] / 1e6, row["way"])
        for row in shown
        if not isinstance(row["way"], int)
    )
    for number, (height, peak, way) in enumerate(others):
        axes.plot(peak, height, "D", color="#57606a", markersize=4, fillstyle="none")
        # Alternate between both sides, to keep names of points of nearly equal height apart.
        side = ({"xytext": (5, 2), "ha": "left"}, {"xytext": (-5, 2), "ha": "right"})[number % 2]
        beside = {"color": "#57606a", "fontsize": 7, **side}
        axes.annotate(_name_of_way(way), (peak, height), textcoords="offset points", **beside)


def _may_quantize(way: str | int) -> bool:
    """Return whether a way of ``experiments.plans`` is a plan or a level with codes."""
    return isinstance(way, int) or way.startswith(("L1", "CB2"))


def _name_of_way(way: str | int) -> str:
    """Return the name of a way of ``experiments.plans``.

    >>> _name_of_way("compiled 50"), _name_of_way(650_000_000), _name_of_way("L1 4")
    ('compile, budget 50 %', 'plan for 650 MB', 'L1 4 bit')
    """
    if isinstance(way, int):
        return f"plan for {way / 1e6:,.0f} MB"
    name, _, number = way.rpartition(" ")
    if name == "compiled":
        return f"compile, budget {number} %"
    return f"{way} bit" if number.isdigit() else way


def _svg(figure: Figure, title: Sequence[str]) -> str:
    svg = io.StringIO()
    about = {"Title": "; ".join(title), "Date": None, "Creator": None}
    figure.savefig(svg, format="svg", transparent=True, metadata=about)
    return svg.getvalue()


def _measured(content: Mapping[str, Any], name: str, way: str, bits: int) -> Points:
    """Return the largest value of a process, by number of processes."""
    return [
        (run["parts"], max(rank[name] for rank in run["ranks"]) / 1e6)
        for run in content["runs"]
        if run["way"] == way and (run["halo_bits"] == bits or run["parts"] == 1)
    ]


def _counted(content: Mapping[str, Any], way: str, bits: int) -> Points:
    runs = [r for r in content["runs"] if (r["way"], r["halo_bits"]) == (way, bits)]
    several = [run for run in runs if run["parts"] > 1]
    if not several:
        return []
    ranks = max(several, key=lambda run: run["parts"])["ranks"]
    sizes = content["counted"]
    return [(size["parts"], modelled(size, ranks, None)["sent_bytes"] / 1e6) for size in sizes]


def _panel(
    axes: Any, title: str, lines: Mapping[str, Points], dashed: Mapping[str, Points]
) -> None:
    for color, (name, line) in zip(_COLORS, lines.items(), strict=False):
        axes.plot(*zip(*line, strict=True), color=color, label=name)
        if dashed.get(name):
            axes.plot(*zip(*dashed[name], strict=True), color=color, linestyle="--")
    parts = sorted({point[0] for line in (*lines.values(), *dashed.values()) for point in line})
    axes.set_xscale("log", base=2)
    axes.set_xticks(parts, map(str, parts))
    axes.minorticks_off()
    axes.set(title=title, xlabel="processes")
    axes.set_ylim(bottom=0)
    axes.grid(axis="y")
    axes.legend(frameon=False)
