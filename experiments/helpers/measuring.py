"""What measuring sensitivities costs a training."""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Sequence


def cost_of_measuring(seconds: Sequence[float], passes: Sequence[int]) -> dict[str, float]:
    """What the steps that measured took beyond an ordinary one.

    Args:
        seconds: Of each step.
        passes: What measuring had taken after each step, as the report counts it.

    Returns:
        ``step_seconds`` of an ordinary step, the median; in such steps, what the first measurement
        took (``first_measurement_steps``: steps that measure one after the other are halves of
        one), and what all took (``measuring_steps``). Nothing where every step measured.

    >>> cost_of_measuring([1.0, 1.0, 2.0, 3.0, 1.0], [0, 0, 1, 3, 3])
    {'step_seconds': 1.0, 'first_measurement_steps': 3.0, 'measuring_steps': 3.0}
    """
    measures = [after > before for before, after in itertools.pairwise([0, *passes])]
    ordinary = [one for one, measured in zip(seconds, measures, strict=True) if not measured]
    if not ordinary:
        return {}
    step = statistics.median(ordinary)
    # The first steps of all fill caches, so the extra time is that of steps that measured alone.
    extra = [
        one / step - 1 if measured else 0.0 for one, measured in zip(seconds, measures, strict=True)
    ]
    begin = measures.index(True) if True in measures else len(measures)
    first = itertools.takewhile(bool, measures[begin:])
    return {
        "step_seconds": step,
        "first_measurement_steps": sum(extra[begin : begin + len([*first])]),
        "measuring_steps": sum(extra),
    }
