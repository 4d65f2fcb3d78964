"""``report.md``: the result of a run for reading, all of it taken from ``result.json``."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from datasets.memory import format_bytes
from experiments.helpers import plot, results, summary
from experiments.helpers.kept import write_atomically
from experiments.helpers.notes import notes

FILE_NAME = "report.md"


def write_report(outcome: results.Results, out: Path) -> None:
    """Write ``out/report.md``.

    Raises:
        ResultsError: If the system refuses.
    """
    write_atomically(out / FILE_NAME, render(outcome).encode())


def render(outcome: results.Results) -> str:
    """Return the report: result, notes, curves, each seed, saved contexts, configuration."""
    parts = [
        f"# {summary.title(outcome.config)}",
        markdown_table(("", "over the seeds"), summary.table(outcome)),
        "\n".join(f"- {note}" for note in notes(outcome.config)),
        f"![Curves]({plot.FILE_NAME})",
        "## Seeds",
        markdown_table(
            ("seed", "test, %", "validation, %", "best epoch", "rate", "peak", "s/epoch"),
            [_seed_row(run) for run in outcome.runs],
        ),
    ]
    if outcome.runs:
        last = outcome.runs[-1]
        parts += [
            f"## Where the memory went (seed {last['seed']})",
            markdown_table(
                ("slot", "role", "codec", "bits", "raw", "stored"),
                [_context_row(context) for context in last["contexts"]],
            ),
        ]
    settings = {**outcome.config, **{f"{name} version": v for name, v in outcome.versions.items()}}
    parts += [
        "## Configuration",
        markdown_table(("key", "value"), [(key, str(value)) for key, value in settings.items()]),
        f"All numbers: `{results.FILE_NAME}`.",
    ]
    return "\n\n".join(parts) + "\n"


def markdown_table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a table; a bar inside a cell is escaped."""
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(
        "| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines
    )


def _seed_row(run: dict[str, Any]) -> tuple[str, ...]:
    return (
        str(run["seed"]),
        summary.percent(_known(run["test_score"])),
        summary.percent(_known(run["val_score"])),
        str(run["best_epoch"]),
        summary.factor(_known(run["rate"])),
        summary.mean_bytes(_known(run["peak_bytes"])),
        summary.seconds(_known(run["epoch_seconds"])),
    )


def _context_row(context: dict[str, Any]) -> tuple[str, ...]:
    return (
        f"`{context['slot']}`",
        context["role"],
        context["codec"],
        str(context["bits"]),
        format_bytes(context["raw_bytes"]),
        format_bytes(context["stored_bytes"]),
    )


def _known(value: float | None) -> list[float]:
    return [] if value is None else [value]
