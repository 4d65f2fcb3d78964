"""A plan as a table by layer, with the memory over the step, and as a picture."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from gact_graph.adaptive.adaptation import ALARM
from gact_graph.api.budget.planned_tensor import PlannedTensor
from gact_graph.api.report.curves import Curve
from gact_graph.api.report.names import format_bytes, format_error, label_of, layer_of
from gact_graph.api.report.sheet import Line, Sheet

if TYPE_CHECKING:
    from gact_graph.api.budget.plan import Plan


def sheet_of(plan: Plan) -> Sheet:
    """Return the choices, bytes, time and error by layer, and the memory over the step."""
    layers: dict[str, list[PlannedTensor]] = {}
    for tensor in plan.tensors:
        layers.setdefault(layer_of(tensor.slot), []).append(tensor)
    total = _cells(plan.tensors)
    return Sheet(
        plan.headline,
        ["layer", *(column for column, cell in total.items() if cell)],
        [Line(label_of(name), _cells(tensors)) for name, tensors in layers.items()],
        Line("total", total | {"tensors": ""}),
        curves=_curves(plan),
        limit=plan.memory,
        notes=[
            f"strategy: {plan.strategy.name}; {_of_error(plan)}",
            f"time of a step, by trials on parts of the graph: about {plan.seconds:.2g} s",
        ],
    )


def _cells(tensors: Sequence[PlannedTensor]) -> dict[str, str]:
    """Return the cells of a layer: its choices, the largest first, bytes, time and error."""
    counts: dict[str, tuple[int, int]] = {}
    for tensor in tensors:
        number, size = counts.get(tensor.choice, (0, 0))
        counts[tensor.choice] = number + 1, size + max(tensor.bytes, tensor.stock_bytes)
    largest = sorted(counts, key=lambda choice: -counts[choice][1])
    error = sum(tensor.error for tensor in tensors)
    seconds = sum(tensor.seconds for tensor in tensors)
    return {
        "tensors": ", ".join(f"{choice} ({counts[choice][0]})" for choice in largest),
        "stock": format_bytes(sum(tensor.stock_bytes for tensor in tensors)),
        "planned": format_bytes(sum(tensor.bytes for tensor in tensors)),
        "time": f"{1e3 * seconds:.1f} ms" if seconds else "",
        "error": format_error(error) if error else "",
    }


def _of_error(plan: Plan) -> str:
    if not any(" bits" in tensor.choice for tensor in plan.tensors):
        return "the gradient is exact"
    error = f"expected error of the gradient {format_error(plan.error)}"
    if plan.error > ALARM:
        error += ", of which most would be noise: take more memory"
    if not plan.strategy.measures:
        error += "; no room to measure sensitivities during training"
    return error


def _curves(plan: Plan) -> list[Curve]:
    steps = plan.step(plan.stock_peaks), plan.step(plan.peaks)
    names = ("stock", "stock"), ("planned", "now")
    return [Curve(*name, _points(step)) for name, step in zip(names, steps, strict=True)]


def _points(step: Mapping[tuple[str, bool], int]) -> list[tuple[float, int]]:
    """Return the start and the end of each part: those of forward are equally long, and so on."""
    number = len(step)
    # Where a step differs between parts of the graph, its peak alone is known.
    turn = max((place for place, end in enumerate(step, 1) if not end[1]), default=number / 2)
    places = np.interp(range(number + 1), [0, turn, number], [0, 0.5, 1]).tolist()
    return [
        (places[place + side], size) for place, size in enumerate(step.values()) for side in (0, 1)
    ]


def draw(plan: Plan, path: Path) -> None:
    """Write the memory over the step beside that of stock as an image, by matplotlib."""
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError(
            "Expected matplotlib for a picture (got none): pip install matplotlib"
        ) from error
    figure = Figure(figsize=(9, 4), layout="constrained")
    axes = figure.add_subplot()
    for curve in _curves(plan):
        places, sizes = zip(*curve.points, strict=True)
        heights = [size / 2**20 for size in sizes]
        color = {"stock": "#9aa5b1", "now": "#d1495b"}[curve.color]
        axes.fill_between(places, heights, alpha=0.3, color=color)
        axes.plot(places, heights, label=curve.name, color=color)
    axes.axhline(plan.memory / 2**20, color="#1d3557", linestyle="--", label="budget")
    axes.set_xlim(0, 1)
    axes.set_xticks([0, 0.5, 1], ["start of forward", "start of backward", "end of backward"])
    axes.set_ylabel("MiB")
    axes.set_title(plan.headline, fontsize=10)
    axes.legend(loc="upper right")
    figure.savefig(path, dpi=120)
