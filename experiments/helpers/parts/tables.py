"""The tables of ``python -m experiments.partition``: what was measured, and what was counted."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from experiments.helpers.markdown import markdown_table
from experiments.helpers.parts.counting import BANDWIDTH, LATENCY, modelled

HEAD = (
    *("processes", "", "halo bits", "peak, MB", "sent per step, MB"),
    *("s/step", "CPU s/step", "exchanges", "loss", "difference to one process"),
)

COUNTED_HEAD = (
    *("parts", "nodes per part", "largest halo", "all halos / nodes"),
    *("halo bits", "sent per step, MB", "network, s/step", "s/step"),
)


def rows(found: Mapping[str, Any]) -> list[tuple[str, ...]]:
    """A row for each run, under :data:`HEAD`, of the process that takes or sends most."""
    table: list[tuple[str, ...]] = []
    for run in found["runs"]:
        ranks = run["ranks"]
        alone = _run(found, 1, run["way"], 32)
        loss = ranks[0]["loss"]
        off = "" if alone is None else f"{loss / alone['ranks'][0]['loss'] - 1:+.1e}"
        table.append(
            (
                str(run["parts"]),
                run["way"],
                "" if run["parts"] == 1 else str(run["halo_bits"]),
                _megabytes(_most(ranks, "peak_bytes")),
                _megabytes(_most(ranks, "sent_bytes")),
                _seconds(_most(ranks, "step_seconds")),
                _seconds(_most(ranks, "step_process_seconds")),
                "" if run["parts"] == 1 else f"{_share_of_exchanges(ranks):.1%}",
                f"{loss:.4f}",
                "" if run["parts"] == 1 else off,
            )
        )
    return table


def counted_rows(found: Mapping[str, Any]) -> list[tuple[str, ...]]:
    """A row for each number of parts and bits of the halo, under :data:`COUNTED_HEAD`."""
    table: list[tuple[str, ...]] = []
    several = [run for run in found["runs"] if run["parts"] > 1]
    for size in found["counted"]:
        for bits in found["halo_bits"]:
            runs = [run for run in several if run["halo_bits"] == bits]
            if not runs:
                continue
            run = max(runs, key=lambda one: one["parts"])
            alone = _run(found, 1, run["way"], 32)
            one = modelled(size, run["ranks"], None if alone is None else alone["ranks"][0])
            share = sum(size["halo"]) / sum(size["nodes"])
            table.append(
                (
                    str(size["parts"]),
                    f"{min(size['nodes']):,} to {max(size['nodes']):,}",
                    f"{max(size['halo']):,} rows",
                    f"{share:.2f}",
                    str(bits),
                    f"{one.sent_bytes / 1e6:,.2f}",
                    f"{one.network_seconds:.4f}",
                    _seconds(one.step_seconds),
                )
            )
    return table


def partition(found: Mapping[str, Any]) -> str:
    """Return both tables, with the assumptions of the model."""
    said = (
        "Peak and sent bytes are the maximum over the processes. Dropout is off, so that losses "
        "can be compared. *Exchanges* is the fraction of the CPU time of a step. The last column "
        f"is the relative difference of the loss after {found['steps']} steps to the loss of one "
        "process."
    )
    model = (
        "For more parts, the bytes are computed from the parts and the bytes per row in the runs "
        "above. The times are modeled, not measured: the process with most bytes sends at "
        f"{BANDWIDTH * 8e-9:.0f} Gbit/s, each exchange takes {LATENCY * 1e6:.0f} µs more, and the "
        "computation takes the time of one process times the fraction of edges in the largest part."
    )
    return "\n\n".join(
        (
            markdown_table(HEAD, rows(found)),
            said,
            markdown_table(COUNTED_HEAD, counted_rows(found)),
            model,
        )
    )


def _run(found: Mapping[str, Any], parts: int, way: str, halo_bits: int) -> Any:
    wanted = parts, way, halo_bits
    runs = found["runs"]
    return next((r for r in runs if (r["parts"], r["way"], r["halo_bits"]) == wanted), None)


def _most(ranks: Any, name: str) -> float | None:
    values = [rank[name] for rank in ranks if rank.get(name) is not None]
    return max(values) if values else None


def _share_of_exchanges(ranks: Any) -> float:
    """The largest share of a process's CPU time."""
    share: float = max(r["exchange_process_seconds"] / r["step_process_seconds"] for r in ranks)
    return share


def _megabytes(size: float | None) -> str:
    return "unknown" if size is None else f"{size / 1e6:,.1f}"


def _seconds(time: float | None) -> str:
    return "not timed" if time is None else f"{time:.2f}"
