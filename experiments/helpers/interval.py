"""Means over few seeds, with confidence intervals."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence


def paired_difference(
    these: Mapping[int, float], those: Mapping[int, float], confidence: float = 0.95
) -> tuple[float, float | None]:
    """Return the mean of ``these - those`` over the seeds that both have, and half of its interval.

    By Student's t: seeds start alike in both, so their differences are drawn independently. One
    seed has no interval.

    Args:
        these, those: Scores by seed.
        confidence: How often the interval holds the true mean.

    Raises:
        ValueError: If they have no seed in common.
    """
    differences = [these[seed] - those[seed] for seed in these if seed in those]
    if not differences:
        raise ValueError("Expected at least one seed in both (got none)")
    mean = statistics.fmean(differences)
    if len(differences) == 1:
        return mean, None
    return mean, half_width(differences, confidence)


def half_width(values: Sequence[float], confidence: float = 0.95) -> float:
    """Return half of the interval of the mean of two values or more."""
    from scipy.stats import t

    quantile = float(t.ppf((1 + confidence) / 2, len(values) - 1))
    return quantile * statistics.stdev(values) / math.sqrt(len(values))


def signed_percent(difference: tuple[float, float | None]) -> str:
    """Return a difference of fractions in points, with its interval.

    >>> signed_percent((-0.0012, 0.0034)), signed_percent((0.001, None))
    ('-0.12 ± 0.34', '+0.10')
    """
    mean, half = difference
    shown = f"{100 * mean:+.2f}"
    return shown if half is None else f"{shown} ± {100 * half:.2f}"
