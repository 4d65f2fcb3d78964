"""The curves of a run as a picture."""

from __future__ import annotations

import io
import math
from pathlib import Path
from typing import TYPE_CHECKING, Any

from experiments.helpers.atomic import write_atomically
from experiments.helpers.errors import ExperimentError
from experiments.helpers.results import Results
from experiments.helpers.summary import title

if TYPE_CHECKING:
    from matplotlib.figure import Figure

FILE_NAME = "curves.png"


def require_matplotlib() -> None:
    """Fail before the training instead of after it.

    Raises:
        ExperimentError: If matplotlib is missing; the text names the extra that brings it.
    """
    _figure()


def plot_curves(results: Results, out: Path) -> None:
    """Draw loss and validation score over epochs, one line a seed, into ``out/curves.png``.

    Raises:
        ExperimentError: If matplotlib is missing, or the file cannot be written.
    """
    figure = _figure()
    left, right = figure.subplots(1, 2)
    for run in results.runs:
        epochs = range(1, len(run["loss"]) + 1)
        label = f"seed {run['seed']}"
        left.plot(epochs, _numbers(run["loss"]), linewidth=1, label=label)
        scores = [100 * value for value in _numbers(run["val_curve"])]
        (line,) = right.plot(epochs, scores, linewidth=1, label=label)
        best = run["best_epoch"]
        right.plot(best, scores[best - 1], "o", markersize=4, color=line.get_color())
    metric = "micro-F1" if results.config["multi_label"] else "accuracy"
    left.set(xlabel="epoch", ylabel="training loss")
    right.set(xlabel="epoch", ylabel=f"validation {metric}, % (dot: best epoch)")
    for axes in (left, right):
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(alpha=0.3)
        axes.xaxis.get_major_locator().set_params(integer=True)
    # The loss falls, so this corner is free.
    left.legend(loc="upper right", frameon=False, fontsize="small", ncols=2)
    figure.suptitle(title(results.config))
    picture = io.BytesIO()
    figure.savefig(picture, format="png", dpi=120)
    write_atomically(out / FILE_NAME, picture.getvalue())


def _figure() -> Figure:
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise ExperimentError(
            "Expected matplotlib for the curves of --out (got none): "
            'pip install "gact_graph[experiments]"'
        ) from None
    # A Figure of its own, not pyplot's: no display, no state shared with anybody.
    return Figure(figsize=(10, 4), layout="constrained")


def _numbers(curve: list[Any]) -> list[float]:
    """NaN, which JSON lost as ``None``, leaves a gap in the line."""
    return [math.nan if value is None else value for value in curve]
