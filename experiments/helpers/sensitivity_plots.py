"""The plots of :mod:`experiments.sensitivity` and :mod:`experiments.variance`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

_SHOWN = 10
"""Slots in the plot of the evolution: those that were most sensitive at the end."""


def plot_sensitivities(slots: Sequence[dict[str, Any]], path: Path) -> None:
    """c_l as a line and bits as bars, by slot."""
    figure, axes = _figure(10, 3.5 + 0.1 * len(slots))
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


def plot_variances(variances: Sequence[dict[str, Any]], path: Path) -> None:
    """What each scheme adds to the gradient's variance."""
    figure, axes = _figure(6, 3)
    names = [v["scheme"] for v in variances]
    values = [v["variance"] for v in variances]
    colors = ["#0072b2" if "adaptive" in name else "#9aa5b1" for name in names]
    bars = axes.barh(names, values, color=colors)
    sizes = [v["quantized_bytes"] / 1e6 for v in variances]
    labels = [f"{v:.2g}  ({size:,.1f} MB)" for v, size in zip(values, sizes, strict=True)]
    axes.bar_label(bars, labels, padding=3, fontsize=8)
    axes.set_xscale("log")
    axes.set_xlim(min(values) / 3, max(values) * 30)
    axes.invert_yaxis()
    axes.set_xlabel("variance from compression / squared gradient")
    figure.savefig(path, dpi=120)


def plot_evolution(evolution: Sequence[dict[str, Any]], path: Path) -> None:
    """c_l of the most sensitive slots over the epochs."""
    figure, axes = _figure(9, 4.5)
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


def plot_agreement(slots: Sequence[dict[str, Any]], path: Path) -> None:
    """The variance that Algorithm 1 predicts against the true one, a point a slot."""
    figure, axes = _figure(7, 4.5)
    for slot in slots:
        axes.plot(slot["true"], slot["predicted"], "o", label=slot["slot"])
    ends = [min(s["true"] for s in slots) / 2, max(s["true"] for s in slots) * 2]
    axes.plot(ends, ends, color="#9aa5b1", linewidth=1, zorder=0)
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.set_xlabel("variance over many draws / squared gradient")
    axes.set_ylabel("by Algorithm 1")
    figure.legend(loc="outside right upper", fontsize=7)
    figure.savefig(path, dpi=120)


def plot_sum(found: dict[str, Any], path: Path) -> None:
    """The variance of all slots together beside the single ones, stacked."""
    figure, axes = _figure(7, 2.6)
    left = 0.0
    for slot in found["slots"]:
        axes.barh("one at a time, summed", slot["true"], left=left, label=slot["slot"])
        left += slot["true"]
    axes.barh("all together", found["together"], color="#9aa5b1")
    axes.set_xlabel("variance / squared gradient")
    axes.invert_yaxis()
    figure.legend(loc="outside right upper", fontsize=7)
    figure.savefig(path, dpi=120)


def _figure(width: float, height: float) -> tuple[Any, Any]:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained")
    return figure, figure.add_subplot()
