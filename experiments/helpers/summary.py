"""Numbers over seeds, and numbers as text."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from pathlib import PurePath
from typing import Any

from datasets.memory import format_bytes
from experiments.helpers.results import Results


def values(results: Results, key: str) -> list[float]:
    """Return the value of each seed that has one."""
    return [run[key] for run in results.runs if run[key] is not None]


def percent(fractions: Sequence[float]) -> str:
    """Return mean and sample standard deviation of scores in [0, 1], in per cent.

    >>> percent([0.5, 0.52]), percent([0.5])
    ('51.00 ± 1.41', '50.00')
    """
    if not fractions:
        return "-"
    scores = [100 * fraction for fraction in fractions]
    mean = f"{statistics.fmean(scores):.2f}"
    # One seed has no spread; "± 0" would claim that it does.
    return mean if len(scores) == 1 else f"{mean} ± {statistics.stdev(scores):.2f}"


def factor(rates: Sequence[float]) -> str:
    """Return the mean of compression rates.

    >>> factor([7.5, 7.7])
    '7.6x'
    """
    return f"{statistics.fmean(rates):.1f}x" if rates else "-"


def seconds(times: Sequence[float]) -> str:
    """Return the median of times in seconds, to the millisecond.

    >>> seconds([0.0123, 0.0124, 99.0])
    '0.012'
    """
    return f"{statistics.median(times):.3f}" if times else "-"


def mean_bytes(sizes: Sequence[float]) -> str:
    """Return the mean of sizes, see :func:`datasets.memory.format_bytes`."""
    return format_bytes(statistics.fmean(sizes)) if sizes else "-"


def table(results: Results) -> list[tuple[str, str]]:
    """Return the result over all seeds: names of quantities, and their values."""
    metric = "micro-F1" if results.config["multi_label"] else "accuracy"
    return [
        (f"test {metric}, %", percent(values(results, "test_score"))),
        (f"validation {metric}, %", percent(values(results, "val_score"))),
        ("compression rate", factor(values(results, "rate"))),
        ("saved for backward, raw", mean_bytes(values(results, "raw_bytes"))),
        ("saved for backward, stored", mean_bytes(values(results, "stored_bytes"))),
        ("peak memory", mean_bytes(values(results, "peak_bytes"))),
        ("seconds an epoch", seconds(values(results, "epoch_seconds"))),
        *_measuring(results),
        ("seeds", ", ".join(map(str, results.seeds)) or "none"),
    ]


def _measuring(results: Results) -> list[tuple[str, str]]:
    """The share of the time that measured sensitivities, where any were measured."""
    runs = [run for run in results.runs if run["passes"] and run["measuring_seconds"] is not None]
    if not runs:
        return []
    share = sum(r["measuring_seconds"] for r in runs) / sum(r["train_seconds"] for r in runs)
    return [("of it measuring bits", f"{share:.1%}")]


def title(config: dict[str, Any]) -> str:
    """Return a run in a few words.

    >>> title({"model": "gat", "dataset": "cora", "bits": 4, "level": "L1"})
    'GAT on cora, 4 bit (L1)'
    """
    dataset = dataset_name(config["dataset"])
    subject = f"{config['model'].upper()} on {dataset}"
    if config.get("memory") is not None:
        return f"{subject}, within {format_bytes(config['memory'])}"
    bits = "fp32" if config["bits"] == 32 else f"{config['bits']} bit"
    return f"{subject}, {bits} ({config['level']})"


def dataset_name(dataset: str) -> str:
    """Return the name of a data set in a title: a file without its folder.

    >>> dataset_name("/data/cora.npz"), dataset_name("synthetic:reddit@0.1")
    ('cora.npz', 'synthetic:reddit@0.1')
    """
    return PurePath(dataset).name if dataset.endswith(".npz") else dataset
