r"""Batch norm over the rows of a matrix: its backward and its reverse, in the memory of the input.

With the gradient :math:`g` of the result, :math:`d = 1 / \sqrt{\mathrm{variance} + eps}` and a
scale :math:`s = d w` of each column,

.. math::
    \partial x = s \left(g - \overline{g} - (x - \overline{x}) \, d^2 \, \overline{(x -
    \overline{x}) g}\right),

where bars are means over the rows (Ioffe and Szegedy, "Batch Normalization", ICML 2015, section 3).
Codes of a norm's input are those of its normalized columns; :func:`restore_columns` gives these
their mean and deviation again. Results do not depend on the number of threads.
"""

from __future__ import annotations

from typing import Final

from gact_graph.ops.reference import batch_norm as reference
from gact_graph.ops.registration import dispatched

batch_norm_backward: Final = dispatched(reference.batch_norm_backward)
restore_columns: Final = dispatched(reference.restore_columns)
