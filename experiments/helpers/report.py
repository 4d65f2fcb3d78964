"""The report of a run, ``report.md``, made from the numbers in ``result.json``."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from experiments.helpers import plot, summary
from experiments.helpers.kept import write_atomically
from experiments.helpers.tables import Column, Table, table

FILE_NAME = "report.md"
RESULT = "result.json"


def _one(key: str, text: Any) -> Any:
    """Return a cell of one run: the text of a list with its value, or of an empty list."""
    return lambda run: text(summary.values([run], key))


_SEEDS: tuple[Column, ...] = (
    ("seed", "{seed}"),
    ("test, %", _one("test_score", summary.percent)),
    ("validation, %", _one("val_score", summary.percent)),
    ("best epoch", "{best_epoch}"),
    ("rate", _one("rate", summary.factor)),
    ("peak", _one("peak_bytes", summary.mean_bytes)),
    ("s/epoch", _one("epoch_seconds", summary.seconds)),
)

_CONTEXTS: tuple[Column, ...] = (
    ("slot", "`{slot}`"),
    ("role", "{role}"),
    ("codec", "{codec}"),
    ("bits", lambda context: str(context["bits"])),
    ("raw", _one("raw_bytes", summary.mean_bytes)),
    ("stored", _one("stored_bytes", summary.mean_bytes)),
)


def write_report(results: Mapping[str, Any], out: Path) -> None:
    """Write ``out/report.md`` and its curves.

    Raises:
        ResultsError: If the system refuses.
    """
    write_atomically(out / FILE_NAME, render(results).encode())
    plot.plot_curves(results, out)


def render(results: Mapping[str, Any]) -> str:
    """Return the report: result, notes, curves, each seed, saved contexts, configuration."""
    parts = [
        f"# {summary.title(results['config'])}",
        summary.table(results).markdown(),
        "\n".join(f"- {note}" for note in summary.notes(results["config"])),
        f"![Curves]({plot.FILE_NAME})",
        "## Seeds",
        table(_SEEDS, results["runs"]).markdown(),
    ]
    if results["runs"]:
        last = results["runs"][-1]
        parts.append(f"## Where the memory went (seed {last['seed']})")
        parts.append(table(_CONTEXTS, last["contexts"]).markdown())
    versions = {f"{name} version": version for name, version in results["versions"].items()}
    rows = [(key, str(value)) for key, value in {**results["config"], **versions}.items()]
    parts += ["## Configuration", Table(("key", "value"), rows).markdown()]
    return "\n\n".join([*parts, f"All numbers: `{RESULT}`."]) + "\n"
