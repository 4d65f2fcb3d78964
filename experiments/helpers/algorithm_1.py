r"""The effect of one slot's noise on the gradient, by GACT (ICML 2022), Algorithm 1.

With the gradient :math:`g_0` under seeds :math:`r_1, \dots, r_L` of the slots' noise, and
:math:`g_1` with :math:`r_l` alone replaced,

.. math::
    c_l = \tfrac{1}{2} \lVert g_0 - g_1 \rVert^2 / S(b_l).

The library finds the same for all slots at once (:mod:`gact_graph.adaptive.sensitivity`) and is
compared with this. The result is also divided by :math:`\lVert g_0 \rVert^2`, which changes no
allocation and makes values of different steps, or under a scaled loss, comparable.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping

import torch
from torch import Tensor

from gact_graph.adaptive.allocator import noise


def algorithm_1(
    slots: Iterable[str],
    bits_of: Callable[[str], int],
    draw: Callable[[str | None], Mapping[int, Tensor]],
) -> dict[str, float]:
    """Return c_l of each slot, relative to the squared length of the gradient.

    Args:
        slots: Names of quantized slots.
        bits_of: The width that each has.
        draw: Runs forward and backward, with another seed for the noise of the slot named, or for
            none, and returns the gradients of the parameters by their places.

    Returns:
        Nothing where the gradient is zero or not finite.
    """
    first = draw(None)
    length = sum(map(_squared, first.values()))
    if not 0 < length < math.inf:
        return {}
    sensitivities = {}
    for slot in slots:
        other = draw(slot)
        squared = sum(_squared(first[place] - gradient) for place, gradient in other.items())
        if squared < math.inf and noise(bits_of(slot)):
            sensitivities[slot] = 0.5 * squared / noise(bits_of(slot)) / length
    return sensitivities


def _squared(gradient: Tensor) -> float:
    values = gradient.coalesce().values() if gradient.is_sparse else gradient
    return float(torch.linalg.vector_norm(values, dtype=torch.float64)) ** 2
