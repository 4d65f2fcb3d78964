"""Memory over one training step, one line a variant."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

# Okabe and Ito's colors, told apart by all eyes.
_COLORS = (
    *("#000000", "#999999", "#E69F00", "#56B4E9", "#D55E00", "#CC79A7", "#009E73", "#0072B2"),
    "#F0E442",
)


def plot_curves(found: Mapping[str, Mapping[str, Any]], title: str, path: Path) -> None:
    """Draw the curves of :func:`experiments.helpers.trial.measure`; a dot ends each forward."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 4.5), layout="constrained")
    axes = figure.add_subplot()
    for color, (name, result) in zip(_COLORS, found.items(), strict=False):
        points = [(t, b / 1e9) for t, b in result["curve"] if b is not None]
        if not points:
            continue
        times, sizes = zip(*points, strict=True)
        peak = result["peak_bytes"] / 1e9
        axes.plot(times, sizes, color=color, label=f"{name}: peak {peak:.2f} GB", linewidth=1.2)
        end = min(points, key=lambda point: abs(point[0] - result["forward_seconds"]))
        axes.plot(*end, "o", color=color, markersize=5)
    axes.set_xlabel("seconds; a dot ends the forward")
    axes.set_ylabel("GB over the start")
    axes.set_ylim(bottom=0)
    axes.set_title(f"Memory over one training step: {title}", fontsize=10)
    axes.legend(fontsize=8)
    figure.savefig(path, dpi=120)
