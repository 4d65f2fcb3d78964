r"""Bits for each slot, by the integer program of GACT (ICML 2022), section 4.1:

.. math::
    \min_b \sum_l c_l S(b_l) \quad \text{subject to} \quad \sum_l D_l b_l \le B, \qquad
    S(b) = (2^b - 1)^{-2},

with the sensitivity :math:`c_l` and the number of elements :math:`D_l` of slot l, and a budget of
:math:`B` bits.
"""

from __future__ import annotations

import bisect
import heapq
import itertools
import math
from collections.abc import Mapping, Sequence

WIDTHS = (*range(1, 9), 16, 32)
"""The widths that a slot may have. At 32 it is not quantized."""

_FIXED = ((8, 2), (24, 1))
"""Up to 8 slots, two of them are fixed to each pair of widths in turn; up to 24 slots, one is. With
few slots, one may take most of the budget, and the greedy search alone may miss the best by a lot.
"""


def noise(bits: int) -> float:
    """S(b), the variance of b bits in units of the group's squared range; 0 at 32 bits."""
    return 0.0 if bits >= 32 else (2.0**bits - 1) ** -2


# How much of S each step from one width to the next removes, per bit.
_RATES = [(noise(a) - noise(b)) / (b - a) for a, b in itertools.pairwise(WIDTHS)]
_LOSSES = [-rate for rate in _RATES]
# Bits an element above the least width.
_COSTS = [width - WIDTHS[0] for width in WIDTHS]


def variance(sensitivities: Sequence[float], bits: Sequence[int]) -> float:
    """The objective: the variance that these bits add to the gradient."""
    return sum(c * noise(b) for c, b in zip(sensitivities, bits, strict=True))


def allocate(sensitivities: Sequence[float], sizes: Sequence[int], budget: float) -> list[int]:
    """The width of each slot.

    All slots start at the least width. While the budget allows, the step to the next width that
    removes the most variance per bit is taken from a heap: O(L log L) for L slots. With few slots,
    this is tried with one or two of them fixed beforehand, and the best result counts.

    Args:
        sensitivities: c_l of each slot, not negative.
        sizes: D_l of each slot: its number of elements.
        budget: B, in bits.

    Returns:
        One of :data:`WIDTHS` for each slot; the least for all if the budget allows no more.
    """
    depth = next((fixed for slots, fixed in _FIXED if len(sizes) <= slots), 0)
    trials = [_greedy(sensitivities, sizes, budget, {})]
    for slots in itertools.combinations(range(len(sizes)), min(depth, len(sizes))):
        for steps in itertools.product(range(len(WIDTHS)), repeat=len(slots)):
            fixed = dict(zip(slots, steps, strict=True))
            if sum(sizes) + sum(_cost(sizes, *pair) for pair in fixed.items()) <= budget:
                trials.append(_greedy(sensitivities, sizes, budget, fixed))
    return min(map(_bits, trials), key=lambda bits: variance(sensitivities, bits))


def allocate_by_name(
    sensitivities: Mapping[str, float],
    sizes: Mapping[str, int],
    average: float,
    least: Mapping[str, int],
) -> dict[str, int]:
    """The width of each slot, for an average of bits an element.

    Args:
        sensitivities: c_l by slot.
        sizes: D_l by slot.
        average: Bits an element on average over all slots.
        least: The least width of a slot, at most the average; 1 for slots that are not named.
    """
    bits: dict[str, int] = {}
    names = [*sizes]
    while True:
        # A slot below its least width gets that, and the others share what is left.
        budget = average * sum(sizes.values())
        budget -= sum(width * sizes[name] for name, width in bits.items())
        found = allocate([sensitivities[n] for n in names], [sizes[n] for n in names], budget)
        given = dict(zip(names, found, strict=True))
        low = {name: least[name] for name in names if given[name] < least.get(name, 1)}
        if not low:
            return {name: bits.get(name, given.get(name, 0)) for name in sizes}
        bits |= low
        names = [name for name in names if name not in low]


def _greedy(
    sensitivities: Sequence[float], sizes: Sequence[int], budget: float, fixed: Mapping[int, int]
) -> list[int]:
    """Steps of :data:`WIDTHS` for each slot; those of ``fixed`` are not moved."""
    left = budget - sum(sizes) - sum(_cost(sizes, slot, step) for slot, step in fixed.items())

    # What a bit of each slot is worth, but for the step. Negative, because a heap pops its least.
    worth = [-c / size if size else 0.0 for c, size in zip(sensitivities, sizes, strict=True)]
    steps = [0 if slot in fixed else step for slot, step in enumerate(_start(worth, sizes, left))]
    left -= sum(_COSTS[step] * size for step, size in zip(steps, sizes, strict=True))
    heap = [
        (worth[slot] * _RATES[step], slot)
        for slot, step in enumerate(steps)
        if slot not in fixed and step < len(_RATES)
    ]
    for slot, step in fixed.items():
        steps[slot] = step
    heapq.heapify(heap)
    least = min(sizes, default=0)
    while heap and left >= least:
        _, slot = heap[0]
        step = steps[slot]
        price = (WIDTHS[step + 1] - WIDTHS[step]) * sizes[slot]
        # If this step is too dear, steps of smaller slots may still fit.
        if price > left:
            heapq.heappop(heap)
            continue
        left -= price
        steps[slot] = step + 1
        if step + 1 < len(_RATES):
            heapq.heapreplace(heap, (worth[slot] * _RATES[step + 1], slot))
        else:
            heapq.heappop(heap)
    return steps


def _start(worth: Sequence[float], sizes: Sequence[int], left: float) -> list[int]:
    """The steps that are worth more than a threshold, which the budget can pay all together.

    The heap would take exactly these first, one by one; this saves that time.
    """
    logs = [(size, math.log(-w)) for w, size in zip(worth, sizes, strict=True) if w and size]
    if not logs or left <= 0:
        return [0] * len(sizes)
    total = sum(size for size, _ in logs)
    # If all slots are alike, this ends one bit before the budget: a bit is worth a factor of four.
    threshold = math.exp(sum(size * log for size, log in logs) / total) * 4.0 ** (1 - left / total)
    while True:
        steps = [bisect.bisect_left(_LOSSES, threshold / w) if w else 0 for w in worth]
        spent = sum(_COSTS[step] * size for step, size in zip(steps, sizes, strict=True))
        if spent <= left:
            return steps
        threshold *= 4


def _cost(sizes: Sequence[int], slot: int, step: int) -> int:
    return _COSTS[step] * sizes[slot]


def _bits(steps: Sequence[int]) -> list[int]:
    return [WIDTHS[step] for step in steps]
