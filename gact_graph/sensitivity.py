r"""How much the noise of one slot moves the gradient: GACT (ICML 2022), Algorithm 1.

With the gradient :math:`g_0` under seeds :math:`r_1, \dots, r_L` of the slots' noise, and
:math:`g_1` with :math:`r_l` alone replaced,

.. math::
    c_l = \tfrac{1}{2} \lVert g_0 - g_1 \rVert^2 / S(b_l).

Here it is also divided by :math:`\lVert g_0 \rVert^2`, which changes no allocation and makes values
of different steps, or under a scaled loss, comparable.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from torch import Tensor

from gact_graph.allocator import noise


def sensitivities(
    slots: Iterable[str],
    bits_of: Callable[[str], int],
    gradient: Callable[[str | None], list[Tensor]],
) -> dict[str, float]:
    """c_l of each slot, relative to the squared length of the gradient.

    Args:
        slots: Names of quantized slots.
        bits_of: The width that each has.
        gradient: The gradients of the parameters, with another seed for the noise of the slot
            named, or for none.

    Returns:
        Nothing where the gradient is zero or not finite.
    """
    first = gradient(None)
    length = _squared(first)
    if not 0 < length < float("inf"):
        return {}
    found = {}
    for slot in slots:
        second = gradient(slot)
        moved = _squared([a - b for a, b in zip(first, second, strict=True)])
        if moved < float("inf") and noise(bits_of(slot)):
            found[slot] = 0.5 * moved / noise(bits_of(slot)) / length
    return found


def _squared(gradients: Iterable[Tensor]) -> float:
    return float(sum(g.double().square().sum().item() for g in gradients))
