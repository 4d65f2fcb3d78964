"""Results over seeds: records, means, intervals, and numbers as text."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from pathlib import PurePath
from typing import Any

from datasets.memory import format_bytes
from experiments.helpers.recipes import base_name, has_foreign_features
from experiments.helpers.tables import Table


def values(runs: Iterable[Mapping[str, Any]], key: str) -> list[float]:
    """Return an entry of the records of seeds, if it is not None."""
    return [run[key] for run in runs if run[key] is not None]


def percent(fractions: Sequence[float]) -> str:
    """Return mean and sample standard deviation of scores in [0, 1], in percent.

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


def paired_difference(
    these: Mapping[int, float], those: Mapping[int, float]
) -> tuple[float, float | None]:
    """Return the mean of ``these - those`` over shared seeds, and half of its 95 % interval.

    By Student's t: seeds start alike in both, so their differences are drawn independently. One
    seed has no interval.

    Raises:
        ValueError: If they have no seed in common.
    """
    differences = [these[seed] - those[seed] for seed in these if seed in those]
    if not differences:
        raise ValueError("Expected at least one seed in both (got none)")
    mean, count = statistics.fmean(differences), len(differences)
    if count == 1:
        return mean, None
    from scipy.stats import t

    quantile = float(t.ppf(0.975, count - 1))
    return mean, quantile * statistics.stdev(differences) / math.sqrt(count)


def points(fraction: float) -> float:
    """Return a difference of fractions in points, to two digits.

    >>> points(0.0123456), points(-0.00001)
    (1.23, 0.0)
    """
    return round(100 * fraction, 2) + 0  # the sum turns -0.0 into 0.0


def signed_percent(difference: tuple[float, float | None]) -> str:
    """Return a difference of fractions in points, with its interval.

    >>> signed_percent((-0.0012, 0.0034)), signed_percent((0.001, None))
    ('-0.12 ± 0.34', '+0.10')
    """
    mean, half = difference
    shown = f"{points(mean):+.2f}"
    return shown if half is None else f"{shown} ± {100 * half:.2f}"


def table(results: Mapping[str, Any]) -> Table:
    """Return the result over all seeds: names of quantities, and their values."""
    metric, runs = metric_of(results["config"]), results["runs"]
    rows = [
        (f"test {metric}, %", percent(values(runs, "test_score"))),
        (f"validation {metric}, %", percent(values(runs, "val_score"))),
        ("compression rate", factor(values(runs, "rate"))),
        ("saved for backward, raw", mean_bytes(values(runs, "raw_bytes"))),
        ("saved for backward, stored", mean_bytes(values(runs, "stored_bytes"))),
        ("peak memory", mean_bytes(values(runs, "peak_bytes"))),
        ("seconds an epoch", seconds(values(runs, "epoch_seconds"))),
    ]
    timed = [run for run in runs if run["passes"] and run["measuring_seconds"] is not None]
    if timed:
        share = sum(r["measuring_seconds"] for r in timed) / sum(r["train_seconds"] for r in timed)
        rows.append(("of it measuring bits", f"{share:.1%}"))
    rows.append(("seeds", ", ".join(str(run["seed"]) for run in runs) or "none"))
    return Table(("", "over the seeds"), rows)


def metric_of(config: Mapping[str, Any]) -> str:
    """Return the name of the score."""
    return "micro-F1" if config["multi_label"] else "accuracy"


def title(config: Mapping[str, Any]) -> str:
    """Return a short title of a run.

    >>> title({"model": "gat", "dataset": "cora", "bits": 4, "level": "L1"})
    'GAT on cora, 4 bit (L1)'
    """
    subject = f"{config['model'].upper()} on {dataset_name(config['dataset'])}"
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


def notes(config: Mapping[str, Any]) -> list[str]:
    """Return remarks on a run's numbers, one sentence or two each."""
    lines, dataset = [], config["dataset"]
    if has_foreign_features(dataset):
        source = {"ogbn-arxiv": "OGB's", "flickr": "Flickr's"}[base_name(dataset)]
        lines.append(
            f"The features of this file are not {source}: scores compare a run with a run, not "
            "with published ones."
        )
    elif dataset == "digits":
        lines.append("The digits graph is not a published benchmark: no scores exist for it.")
    elif dataset.startswith("synthetic:"):
        lines.append("The graph is synthetic: memory and time are meaningful, scores are not.")
    if config["device"] == "cpu":
        lines.append(
            "Peak memory on CPU: the resident set over its value at the start of a seed, which on "
            "a small graph is mostly libraries warming up."
        )
    else:
        lines.append("Peak memory on CUDA: the allocator's maximum, graph and weights included.")
    if config.get("partition") is not None:
        lines.append("Bytes, rates and peak are those of the first process and its part.")
    return [*lines, "Seconds an epoch: the median training step, without evaluation."]
