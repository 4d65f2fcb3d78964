r"""Bits for each slot, by the integer program of GACT (ICML 2022), section 4.1:

.. math::
    \min_b \sum_l c_l S(b_l) \quad \text{subject to} \quad \sum_l D_l b_l \le B, \qquad
    S(b) = (2^b - 1)^{-2},

with the sensitivity :math:`c_l` and the number of elements :math:`D_l` of slot l. Numbers only: no
tensor, no module.
"""

from __future__ import annotations

import bisect
import heapq
import itertools
import math
from collections.abc import Mapping, Sequence

WIDTHS = (*range(1, 9), 16, 32)
"""The widths that may be given. 32 stands for none quantized."""

# With few slots one of them may be most of the budget, and the greedy way may miss by a lot. So up
# to this many slots, that many are fixed beforehand to each width in turn.
_FIXED = ((8, 2), (24, 1))


def noise(bits: int) -> float:
    """S(b), the variance of b bits in units of the group's squared range; none at 32."""
    return 0.0 if bits >= 32 else (2.0**bits - 1) ** -2


# What each step from one width to the next removes from S, for a bit.
_RATES = [(noise(a) - noise(b)) / (b - a) for a, b in itertools.pairwise(WIDTHS)]
_LOSSES = [-rate for rate in _RATES]
# Bits an element above the least.
_COSTS = [width - WIDTHS[0] for width in WIDTHS]


def variance(sensitivities: Sequence[float], bits: Sequence[int]) -> float:
    """The objective: the variance that these bits add to the gradient."""
    return sum(c * noise(b) for c, b in zip(sensitivities, bits, strict=True))


def allocate(sensitivities: Sequence[float], sizes: Sequence[int], budget: float) -> list[int]:
    """The width of each slot.

    All slots start at the least width, and the step that removes the most variance for a bit is
    taken again and again, from a heap, while the budget allows: O(L log L) for L slots. Where slots
    are few this is tried with one or two of them fixed beforehand, and the best one is taken.

    Args:
        sensitivities: c_l of each slot, not negative.
        sizes: D_l, its elements.
        budget: B, in bits.

    Returns:
        One of :data:`WIDTHS` for each slot; all at the least one where the budget is below that.
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
    fixed: Mapping[str, int],
    average: float,
) -> dict[str, int]:
    """An average of bits an element by slots' names, where some slots have their width already."""
    names = [name for name in sizes if name not in fixed]
    taken = sum(fixed[name] * size for name, size in sizes.items() if name in fixed)
    found = allocate(
        [sensitivities[name] for name in names],
        [sizes[name] for name in names],
        average * sum(sizes.values()) - taken,
    )
    given = dict(zip(names, found, strict=True))
    return {name: fixed.get(name, given.get(name, 0)) for name in sizes}


def _greedy(
    sensitivities: Sequence[float], sizes: Sequence[int], budget: float, fixed: Mapping[int, int]
) -> list[int]:
    """Steps of :data:`WIDTHS` for each slot; those of ``fixed`` are not moved."""
    left = budget - sum(sizes) - sum(_cost(sizes, slot, step) for slot, step in fixed.items())

    # What a bit of each slot is worth, but for the step. Negative: the heap has its least first.
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
        # Where a step is too dear, those of smaller slots may still fit.
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
    """The steps worth more than a threshold that all of them together can pay.

    The heap would take just these, one by one, before any other.
    """
    logs = [(size, math.log(-w)) for w, size in zip(worth, sizes, strict=True) if w and size]
    if not logs or left <= 0:
        return [0] * len(sizes)
    total = sum(size for size, _ in logs)
    # Where all slots are alike this stops a bit before the budget does: a bit is a factor of four.
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
