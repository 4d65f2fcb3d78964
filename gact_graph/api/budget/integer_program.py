"""Integer programs with variables of 0 and 1, solved by HiGHS."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]


def minimize(
    cost: Array, rows: Array, most: Array, equalities: int, patience: float
) -> Array | None:
    """Minimize ``cost @ x`` over x of 0 and 1, subject to ``rows @ x <= most``.

    Args:
        cost: The cost of each variable, not negative, [variables].
        rows: The constraints, [constraints, variables].
        most: Their right sides, [constraints].
        equalities: The number of the first constraints that hold with equality.
        patience: Seconds to search.

    Returns:
        The optimum; None if there is none, if it was not found in time, and without HiGHS.
    """
    try:
        import highspy
    except ImportError:
        return None
    program = highspy.HighsLp()
    program.num_col_, program.num_row_ = rows.shape[1], rows.shape[0]
    program.col_cost_ = cost
    program.col_lower_, program.col_upper_ = np.zeros(len(cost)), np.ones(len(cost))
    program.row_lower_ = np.concatenate(
        [most[:equalities], np.full(len(most) - equalities, -highspy.kHighsInf)]
    )
    program.row_upper_ = most
    program.integrality_ = [highspy.HighsVarType.kInteger] * len(cost)
    places = np.nonzero(rows)
    matrix = program.a_matrix_
    matrix.format_ = highspy.MatrixFormat.kRowwise
    matrix.start_ = np.concatenate([[0], np.cumsum(np.bincount(places[0], minlength=len(rows)))])
    matrix.index_, matrix.value_ = places[1], rows[places]
    highs = highspy.Highs()
    options = {"output_flag": False, "threads": 1, "time_limit": patience, "mip_rel_gap": 0.0}
    for name, value in options.items():
        highs.setOptionValue(name, value)
    highs.passModel(program)
    highs.run()
    if highs.getModelStatus() != highspy.HighsModelStatus.kOptimal:
        return None
    return np.array(highs.getSolution().col_value)
