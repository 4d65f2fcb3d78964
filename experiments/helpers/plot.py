"""Curves of a run, and sensitivities by slot, as pictures."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from experiments.helpers.errors import ExperimentError
from experiments.helpers.kept import write_atomically
from experiments.helpers.summary import metric_of, title

if TYPE_CHECKING:
    from matplotlib.figure import Figure

FILE_NAME = "curves.png"

_SHOWN = 10
"""Slots in the plot of the evolution: those that were most sensitive at the end."""


def require_matplotlib() -> None:
    """Raise ExperimentError before the training, if matplotlib is missing."""
    _figure()


def plot_curves(results: Mapping[str, Any], out: Path) -> None:
    """Draw loss and validation score over epochs, one line per seed, into ``out/curves.png``."""
    figure = _figure()
    left, right = figure.subplots(1, 2)
    for run in results["runs"]:
        epochs = range(1, len(run["loss"]) + 1)
        label = f"seed {run['seed']}"
        left.plot(epochs, _numbers(run["loss"]), linewidth=1, label=label)
        scores = [100 * value for value in _numbers(run["val_curve"])]
        (line,) = right.plot(epochs, scores, linewidth=1, label=label)
        best = run["best_epoch"]
        right.plot(best, scores[best - 1], "o", markersize=4, color=line.get_color())
    metric = metric_of(results["config"])
    left.set(xlabel="epoch", ylabel="training loss")
    right.set(xlabel="epoch", ylabel=f"validation {metric}, % (dot: best epoch)")
    for axes in (left, right):
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(alpha=0.3)
        axes.xaxis.get_major_locator().set_params(integer=True)
    # The loss falls, so this corner is free.
    left.legend(loc="upper right", frameon=False, fontsize="small", ncols=2)
    figure.suptitle(title(results["config"]))
    write_atomically(out / FILE_NAME, lambda file: figure.savefig(file, format="png", dpi=120))


def plot_sensitivities(slots: Sequence[dict[str, Any]], path: Path) -> None:
    """Draw c_l as a line and bits as bars, by slot."""
    figure = _figure(10, 3.5 + 0.1 * len(slots))
    axes = figure.add_subplot()
    places = range(len(slots))
    axes.bar(places, [slot["bits"] for slot in slots], color="#9aa5b1", label="bits")
    axes.set_ylabel("bits")
    names = [slot["slot"] for slot in slots]
    axes.set_xticks(list(places), names, rotation=40, ha="right", fontsize=7)
    other = axes.twinx()
    values = [slot["sensitivity"] for slot in slots]
    other.plot(places, values, color="#d1495b", marker="o", label="sensitivity")
    other.set_yscale("log")
    other.set_ylabel("sensitivity $c_l$ / squared gradient")
    handles = [*axes.get_legend_handles_labels()[0], *other.get_legend_handles_labels()[0]]
    figure.legend(handles=handles, loc="outside upper center", ncols=2)
    figure.savefig(path, dpi=120)


def plot_evolution(evolution: Sequence[dict[str, Any]], path: Path) -> None:
    """Draw c_l of the most sensitive slots over the epochs."""
    figure = _figure(9, 4.5)
    axes = figure.add_subplot()
    last = evolution[-1]["sensitivity"]
    for slot in sorted(last, key=lambda name: -last[name])[:_SHOWN]:
        points = [(e["epoch"], e["sensitivity"].get(slot)) for e in evolution]
        known = [(epoch, value) for epoch, value in points if value]
        axes.plot(*zip(*known, strict=True), marker="o", markersize=3, label=slot)
    axes.set_yscale("log")
    axes.set_xlabel("epoch")
    axes.set_ylabel("sensitivity $c_l$ / squared gradient")
    figure.legend(loc="outside right upper", fontsize=7)
    figure.savefig(path, dpi=120)


def _figure(width: float = 10, height: float = 4) -> Figure:
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise ExperimentError(
            "Expected matplotlib for the curves of --out (got none): "
            'pip install "gact_graph[experiments]"'
        ) from None
    # A Figure of its own, not pyplot's, needs no display and shares no state.
    return Figure(figsize=(width, height), layout="constrained")


def _numbers(curve: list[Any]) -> list[float]:
    """Return the values with NaN for ``None``, as JSON has it: NaN leaves a gap in the line."""
    return [math.nan if value is None else value for value in curve]
