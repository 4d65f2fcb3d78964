r"""Widths of the groups of a tensor, for the least noise in the same bytes.

The noise of a group of range r in w bits has the variance r^2 S(w) / 4 at most, with S(w) =
(2^w - 1)^-2. Its effect on the gradient is a weight times that. The sum over groups is least, for a
given sum of widths, where a group gets its next bit if that lowers the weight times r^2 S by more
than a threshold common to all groups. ActNN (ICML 2021) has widths by group, too. The threshold
follows from a histogram of scales, r times the root of the weight, without waiting for the device.
"""

from __future__ import annotations

import functools
import math

import torch
import torch.nn.functional as F
from torch import Tensor

from gact_graph.ops.checks import TILE
from gact_graph.ops.quantize import Channels, Widths, group_ranges

_MOST = 8
"""The most bits of a group."""

_FINENESS = 16
"""Bins of the histogram for a factor of 2."""

_BINS = 20 * _FINENESS
"""Scales below 2^-20 of the largest are in the last bin."""

_LEAST_GROUPS = 1000
"""Groups of a smaller tensor have one width: to choose widths would take longer than to encode."""


def is_divided(numel: int, group_size: int) -> bool:
    """Return whether the groups of a tensor may have widths of their own."""
    return numel // group_size >= _LEAST_GROUPS


def widths_of_groups(
    x: Tensor,
    bits: float,
    group_size: int,
    row_weights: Tensor | None = None,
    row_counts: Tensor | None = None,
    channels: Channels | None = None,
) -> Widths | None:
    """Return widths of groups, with a mean of at most ``bits``.

    Does not wait for the device: of a tensor on a GPU, the number of words is the most that such
    widths may take.

    Args:
        x: A contiguous floating-point tensor.
        bits: From 1 to 16.
        group_size: Elements per group.
        row_weights: The weight of each row, positive, float32 [rows]; None for equal ones.
        row_counts: The number of elements of each row, int64 [rows]; None for equal numbers.
        channels: Those that the elements are normalized with before; None for none.

    Returns:
        None for one width: of a small tensor, and of one or many bits.
    """
    numel = x.numel()
    if not 1 < bits < _MOST or not is_divided(numel, group_size):
        return None
    # Exact groups and groups of equal elements need no bits.
    scales = group_ranges(x, group_size, channels).nan_to_num_(0.0)
    whole, device = len(scales), scales.device
    if row_weights is not None:
        if row_counts is None:
            width = numel // len(row_weights)
            row_counts = torch.full_like(row_weights, width, dtype=torch.int64)
        scales *= _means_by_group(row_weights, row_counts, whole, group_size).sqrt_()
    below = (scales.amax().log2() - scales.log2()).mul_(_FINENESS).nan_to_num_(_BINS - 1)
    bins = below.clamp_(0, _BINS - 1).long()
    first = _first_thresholds(device)
    counts = _counts(bins).expand(first.shape)
    more = torch.zeros(3 * _BINS, dtype=torch.int64, device=device)  # the last threshold is 869
    totals = more.scatter_add_(0, first.view(-1), counts.reshape(-1)).cumsum(0).add_(whole)
    chosen = (totals <= int(bits * whole)).sum() - 1  # as float32, large totals would be rounded
    own = (first <= chosen).sum(0).add_(1).to(torch.uint8)
    count = -(-numel // group_size)
    widths = torch.full((count,), int(bits), dtype=torch.uint8, device=device)
    widths[:whole] = own[bins]
    if device.type == "cpu":
        return Widths.of(widths, numel, group_size)
    return Widths(widths, most_words(numel, bits, group_size))


def most_words(numel: int, bits: float, group_size: int) -> int:
    """Return the most words of a tensor whose whole groups have widths with a mean of ``bits``."""
    whole, rest = divmod(numel, group_size)
    return int(bits * whole) * (group_size // TILE) + int(bits) * -(-rest // TILE)


def _counts(bins: Tensor) -> Tensor:
    """Return the number of groups in each bin [bins], int64."""
    if bins.device.type == "cpu":
        return bins.bincount(minlength=_BINS)
    # On a GPU, bincount() waits for the largest bin.
    counts = torch.zeros(_BINS, dtype=torch.int64, device=bins.device)
    return counts.scatter_add_(0, bins, torch.ones_like(bins))


def _means_by_group(weights: Tensor, counts: Tensor, whole: int, group_size: int) -> Tensor:
    """Return the mean weight of the elements of each whole group, float32 [whole].

    Args:
        weights: The weight of each row.
        counts: The number of elements of each row.
        whole: The number of whole groups.
        group_size: Elements per group.
    """
    starts = F.pad(counts.cumsum(0), (1, 0))
    sums = F.pad(_cumulative(weights.double(), counts), (1, 0))
    ends = torch.arange(whole + 1, device=weights.device) * group_size
    row = torch.searchsorted(starts, ends, right=True).sub_(1).clamp_(max=len(weights) - 1)
    until = sums[row] + (ends - starts[row]) * weights[row]
    return (until.diff() / group_size).float()


def _cumulative(weights: Tensor, counts: Tensor) -> Tensor:
    """Return the cumulative sums of weights times counts, float64."""
    if weights.device.type == "cpu":
        return (weights * counts).cumsum(0)
    # On a GPU, only sums of integers are deterministic.
    scale = 2.0**24 / weights.max().clamp(min=torch.finfo(torch.float32).tiny)
    return ((weights * scale).long() * counts).cumsum(0) / scale


@functools.lru_cache
def _first_thresholds(device: torch.device) -> Tensor:
    """Return the first threshold at which a group gets one more bit [bits, bins], int64.

    Thresholds descend. Threshold t is that of a logarithm of -t over the fineness.
    """
    # By the logarithm of the noise that one more bit takes away.
    lowered = [math.log2(_noise(w) - _noise(w + 1)) for w in range(1, _MOST)]
    of_bits = torch.tensor(lowered, dtype=torch.float64, device=device)[:, None]
    bins = torch.arange(_BINS, dtype=torch.float64, device=device)
    return (2 * bins - _FINENESS * of_bits).floor_().long() + 1


def _noise(bits: int) -> float:
    return (2**bits - 1.0) ** -2
