"""Attention weights from the rows of nodes, as in GATv2.

For the edges :math:`e` of each of R destinations, with heads :math:`h` of C columns :math:`c`,

.. math::
    s_{e, h} = \\sum_c v_{h, c} \\mathrm{LeakyReLU}(a_{p(e), h, c} + b_{r(e), h, c}), \\qquad
    w_{q(e), h} = d_{q(e), h} \\exp(s_{e, h}) \\Big/ \\sum_{f \\in r(e)} \\exp(s_{f, h})

(Brody et al., `How Attentive are Graph Attention Networks? <https://arxiv.org/abs/2105.14491>`_,
equation 7). Edges, weights, tensors and dropout are as in :mod:`gact_graph.ops.attention`. Kernels
materialize no row of an edge.
"""

from typing import Final

from gact_graph.ops.reference import leaky_attention as reference
from gact_graph.ops.registration import dispatched

leaky_attention: Final = dispatched(reference.leaky_attention)
leaky_attention_backward: Final = dispatched(reference.leaky_attention_backward)
leaky_attention_source: Final = dispatched(reference.leaky_attention_source)
