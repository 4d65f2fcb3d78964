"""Tables of the time of a step: by the size of the graph, and beside other processes."""

from __future__ import annotations

from pathlib import Path

from experiments import allocators as by_allocator
from experiments.helpers.labels import LAYERS, label
from experiments.helpers.markdown import markdown_table
from experiments.helpers.table_sources import read, source, sources


def overhead(results: Path) -> str:
    """Steps over stock's by the size of the graph, for each level."""
    found = read(results / "overhead.json")
    rows = [
        (
            LAYERS[model],
            row,
            f"{timing['edges']:,.0f}",
            f"{timing['median_seconds']['fp32']:.2f} s",
            *(f"{timing['ratio'][level]:.2f}x" for level in found["levels"]),
        )
        for model, timings in found["models"].items()
        for row, timing in timings.items()
    ]
    levels = [label(level, found["bits"]) for level in found["levels"]]
    head = ("", "", "edges", "stock PyG", *levels)
    return f"{markdown_table(head, rows)}\n\n{sources([found])}"


def overhead_of_default(results: Path) -> str:
    """The same of the default level alone."""
    found = read(results / "overhead.json")
    rows = [
        (LAYERS[model], *(f"{timing['ratio']['L1']:.2f}" for timing in timings.values()))
        for model, timings in found["models"].items()
    ]
    head = ("relative to stock", *next(iter(found["models"].values())))
    return f"{markdown_table(head, rows)}\n\n{sources([found])}"


def busy(results: Path) -> str:
    """How long steps take alone, and how many times as long beside processes that never rest."""
    found = read(results / "busy.json")
    ways = {"fp32": "stock PyG"}
    ways |= {level: f"`{label(level, found['bits'])}`, blocks" for level in found["levels"]}
    rows = []
    for model, timing in found["models"].items():
        for way, said in ways.items():
            seconds = timing["median_seconds"]
            alone, beside = seconds[way], seconds[f"{way}, busy"]
            times = f"{timing['slowdown'][way]:.2f}x"
            rows.append((LAYERS[model], said, f"{alone:.2f} s", f"{beside:.2f} s", times))
    head = ("", "", "alone", f"beside {found['busy']} busy processes", "times as long")
    return f"{markdown_table(head, rows)}\n\n{source(found)}"


def allocators(results: Path) -> str:
    """Return time and peak of a step under each CPU allocator."""
    found = read(results / "allocators.json")
    table = markdown_table(by_allocator.HEAD, by_allocator.rows(found["medians"]))
    return f"{table}\n\n{source(found)}"
