r"""The backward of batch norm over the rows of a matrix, in the memory of its input.

With the gradient :math:`g` of the result, :math:`d = 1 / \sqrt{\mathrm{variance} + eps}` and a
scale :math:`s = d w` of each column,

.. math::
    \partial x = s \left(g - \overline{g} - (x - \overline{x}) \, d^2 \, \overline{(x -
    \overline{x}) g}\right),

where bars are means over the rows (Ioffe and Szegedy, "Batch Normalization", ICML 2015, section 3).
Results do not depend on the number of threads.
"""

from __future__ import annotations

from gact_graph.ops.reference import batch_norm as reference
from gact_graph.ops.registration import dispatched

batch_norm_backward = dispatched(reference.batch_norm_backward)
