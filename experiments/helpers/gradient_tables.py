"""The tables of how exact gradients are."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from experiments.allocation import ratios
from experiments.helpers import summary
from experiments.helpers.labels import LABELS, LAYERS
from experiments.helpers.markdown import markdown_table
from experiments.helpers.table_sources import read, source, sources


def gradient_variance(results: Path) -> str:
    files = [read(path) for path in sorted((results / "sensitivity").glob("*.json"))]
    rows = []
    for found in files:
        adaptive, uniform, double = (entry["variance"] for entry in found["variance"])
        rows.append(
            (
                f"{found['model'].upper()}, {summary.dataset_name(found['dataset'])}",
                f"{adaptive:.2g}",
                f"{uniform:.2g}",
                f"{adaptive / uniform:.2f}",
                f"{double:.2g}",
                f"{found['least_variance']:.2g}",
            )
        )
    head = ("", "adaptive 4 bit", "uniform 4 bit", "ratio", "uniform 8 bit", "bound for any 4 bits")
    return f"{markdown_table(head, rows)}\n\n{sources(files)}"


def allocation(results: Path) -> str:
    files = [read(path) for path in sorted((results / "allocation").glob("*.json"))]
    rows = []
    for found in files:
        for row in found["rows"]:
            over_sweep, over_uniform = ratios(row["points"], "variance")
            apart = [p["library"]["variance"] / p["algorithm 1"]["variance"] for p in row["points"]]
            rows.append(
                (
                    LAYERS[row["model"]],
                    LABELS[row["way"]],
                    str(row["bits"]),
                    f"{over_sweep:.2f}",
                    f"{min(apart):.2f} to {max(apart):.2f}",
                    f"{over_uniform:.2f}",
                )
            )
    head = ("", "", "bits", "to Algorithm 1", "range over the points", "to uniform bits")
    return f"{markdown_table(head, rows)}\n\n{sources(files)}"


def gradient_error(results: Path) -> str:
    """Return the error of the gradient of each model, the newest version first."""
    folder = results / "gradient_error"
    files = [
        read(path) for path in (*sorted(folder.glob("*.json")), *sorted(folder.glob("*/*.json")))
    ]
    rows = []
    for found in files:
        for bits in (4, 2):
            fixed, adaptive = (_error_row(found, bits, way) for way in (False, True))
            if fixed is not None:
                shown = (_error(fixed, "first"), _error(fixed, "last"), _error(adaptive, "last"))
                rows.append((fixed["model"], str(bits), *shown, found["commit"]))
    head = ("", "bits", "first step", "fixed", "adaptive", "commit")
    rows.sort(key=lambda row: row[0])
    return f"{markdown_table(head, rows)}\n\n{sources(files)}"


def _error_row(found: Any, bits: int, adaptive: bool) -> Any:
    rows = (r for r in found["rows"] if r["bits"] == bits and r["adaptive"] == adaptive)
    return next(rows, None)


def _error(row: Mapping[str, Any] | None, step: str) -> str:
    if row is None or row.get(step) is None:
        return "not run"
    return f"{row[step]:.3f} ± {row[f'{step}_standard_error']:.3f}"


def bias(results: Path) -> str:
    files = [read(path) for path in sorted((results / "bias").glob("*.json"))]
    shown: dict[tuple[str, str], dict[int, str]] = {}
    for found in files:
        highest = max(0.0, found["bias_squared"] + 2 * found["bias_squared_error"]) ** 0.5
        row = shown.setdefault((found["model"], found["norm"] or "none"), {})
        row[found["bits"]] = f"{found['bias']:.2%} (below {highest:.2%})"
    rows = [(*key, *(row.get(b, "not run") for b in (4, 2))) for key, row in shown.items()]
    return f"{markdown_table(('', 'norm', '4 bits', '2 bits'), rows)}\n\n{sources(files)}"


def agreement(results: Path) -> str:
    found = read(results / "variance" / "digits.json")
    rows = [
        (
            f"`{slot['slot']}`",
            str(slot["bits"]),
            f"{slot['predicted']:.3g}",
            f"{slot['true']:.3g}",
            f"{slot['predicted'] / slot['true']:.2f}",
        )
        for slot in found["slots"]
    ]
    rows.append(
        (
            "all together",
            "",
            f"{found['sum_of_single']:.3g} (sum)",
            f"{found['together']:.3g}",
            f"{found['sum_of_single'] / found['together']:.2f}",
        )
    )
    head = ("slot", "bits", "by sensitivity", "over the draws", "ratio")
    return f"{markdown_table(head, rows)}\n\n{source(found)}"
