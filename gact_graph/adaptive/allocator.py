r"""Bits for each slot, from the integer program of GACT (ICML 2022), section 4.1:

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
"""The widths of slots. At 32 bits a slot is not quantized."""

_FIXED = ((8, 2), (24, 1))
"""With up to 8 slots, each pair of slots is fixed to each pair of widths in turn; with up to 24,
each single slot. A single slot may then take most of the budget, and the greedy search may be far
from the optimum."""


def noise(bits: int) -> float:
    """Return S(b), the variance of b bits in units of the group's squared range; 0 at 32 bits."""
    return 0.0 if bits >= 32 else (2.0**bits - 1) ** -2


# The part of S that each step to the next width removes, per bit.
_RATES = [(noise(a) - noise(b)) / (b - a) for a, b in itertools.pairwise(WIDTHS)]
_LOSSES = [-rate for rate in _RATES]
# Bits an element above the least width.
_COSTS = [width - WIDTHS[0] for width in WIDTHS]


def variance(sensitivities: Sequence[float], bits: Sequence[int]) -> float:
    """Return the objective: the variance that these bits add to the gradient."""
    return sum(c * noise(b) for c, b in zip(sensitivities, bits, strict=True))


def allocate(sensitivities: Sequence[float], sizes: Sequence[int], budget: float) -> list[int]:
    """Return the width of each slot.

    All slots start at the least width. While the budget allows, the step to the next width that
    removes the most variance per bit is taken from a heap: O(L log L) for L slots. With few slots,
    the search runs with each one or two of them fixed beforehand, and the best result is used.

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
            if sum(sizes) + _cost(sizes, fixed) <= budget:
                trials.append(_greedy(sensitivities, sizes, budget, fixed))
    widths = ([WIDTHS[step] for step in steps] for steps in trials)
    return min(widths, key=lambda bits: variance(sensitivities, bits))


def allocate_by_name(
    sensitivities: Mapping[str, float],
    sizes: Mapping[str, int],
    average: float,
    least: Mapping[str, int],
) -> dict[str, int]:
    """Return the width of each slot for an average number of bits an element.

    Args:
        sensitivities: c_l by slot.
        sizes: D_l by slot.
        average: The average of bits an element over all slots.
        least: The least width by slot, at most the average; 1 for other slots.
    """
    bits: dict[str, int] = {}
    names = [*sizes]
    while True:
        # Slots below their least width get that width, and the others share the remaining budget.
        budget = average * sum(sizes.values())
        budget -= sum(width * sizes[name] for name, width in bits.items())
        widths = allocate([sensitivities[n] for n in names], [sizes[n] for n in names], budget)
        free = dict(zip(names, widths, strict=True))
        low = {name: least[name] for name in names if free[name] < least.get(name, 1)}
        if not low:
            return {name: bits.get(name, free.get(name, 0)) for name in sizes}
        bits |= low
        names = [name for name in names if name not in low]


def _greedy(
    sensitivities: Sequence[float], sizes: Sequence[int], budget: float, fixed: Mapping[int, int]
) -> list[int]:
    """Return an index into :data:`WIDTHS` for each slot; ``fixed`` has those that do not change."""
    left = budget - sum(sizes) - _cost(sizes, fixed)
    # The worth of a bit of each slot, except for its step. Negative: a heap pops its least item.
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
        # If this step exceeds the budget, steps of smaller slots may still fit.
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
    """Return the steps whose worth exceeds a threshold at which the budget covers all of them.

    The heap would take exactly these steps first, which is slower.
    """
    logs = [(size, math.log(-w)) for w, size in zip(worth, sizes, strict=True) if w and size]
    if not logs or left <= 0:
        return [0] * len(sizes)
    total = sum(size for size, _ in logs)
    # If all slots are equal, this ends one bit below the budget: a bit is worth a factor of four.
    threshold = math.exp(sum(size * log for size, log in logs) / total) * 4.0 ** (1 - left / total)
    while True:
        steps = [bisect.bisect_left(_LOSSES, threshold / w) if w else 0 for w in worth]
        spent = sum(_COSTS[step] * size for step, size in zip(steps, sizes, strict=True))
        if spent <= left:
            return steps
        threshold *= 4


def _cost(sizes: Sequence[int], steps: Mapping[int, int]) -> int:
    return sum(_COSTS[step] * sizes[slot] for slot, step in steps.items())
