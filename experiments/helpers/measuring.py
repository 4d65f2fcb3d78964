"""The cost of measuring sensitivities in a training."""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Sequence


def cost_of_measuring(seconds: Sequence[float], passes: Sequence[int]) -> dict[str, float]:
    """Return the time of steps that measured beyond that of ordinary steps.

    Args:
        seconds: Of each step.
        passes: The number of measurements after each step, as the report counts them.

    Returns:
        ``step_seconds``, the median of ordinary steps; in such steps, the time of the first
        measurement (``first_measurement_steps``: steps that measure in a row are parts of it), and
        of all (``measuring_steps``). Nothing where every step measured.

    >>> cost_of_measuring([1.0, 1.0, 2.0, 3.0, 1.0], [0, 0, 1, 3, 3])
    {'step_seconds': 1.0, 'first_measurement_steps': 3.0, 'measuring_steps': 3.0}
    """
    measures = [after > before for before, after in itertools.pairwise([0, *passes])]
    ordinary = [s for s, measured in zip(seconds, measures, strict=True) if not measured]
    if not ordinary:
        return {}
    step = statistics.median(ordinary)
    # The first steps of all fill caches, so the extra time is that of steps that measured alone.
    extra = [
        s / step - 1 if measured else 0.0 for s, measured in zip(seconds, measures, strict=True)
    ]
    begin = measures.index(True) if True in measures else len(measures)
    first = itertools.takewhile(bool, measures[begin:])
    return {
        "step_seconds": step,
        "first_measurement_steps": sum(extra[begin : begin + len([*first])]),
        "measuring_steps": sum(extra),
    }
