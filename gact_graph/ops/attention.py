"""Attention weights from the scores of nodes, as in GAT.

For the edges :math:`e` of each of R destinations, with heads :math:`h`,

.. math::
    s_{e, h} = \\mathrm{LeakyReLU}(a_{p(e), h} + b_{r(e), h} + c_{q(e), h}), \\qquad
    w_{q(e), h} = d_{q(e), h} \\exp(s_{e, h}) \\Big/ \\sum_{f \\in r(e)} \\exp(s_{f, h}),

where :math:`d` is dropout and :math:`c` is the score of the edge's features, if it has any
(Velickovic et al., `Graph Attention Networks <https://arxiv.org/abs/1710.10903>`_, section 2.1).
The E edges are sorted by destination: destination r has the edges ``starts[r] - starts[0]`` to
``starts[r + 1] - starts[0]``. All tensors are contiguous, on one device, and of one floating-point
type. Results do not depend on the number of threads.

Dropout is a pure function of the seed and the index of a weight, so backward computes the same mask
again. Its probability is rounded to a multiple of :math:`2^{-16}`; its expectation is 1.
"""

from typing import Final

from gact_graph.ops.reference import attention as reference
from gact_graph.ops.registration import dispatched

attention: Final = dispatched(reference.attention)
attention_backward: Final = dispatched(reference.attention_backward)
segment_sum: Final = dispatched(reference.segment_sum)
