"""Attention weights from dot products of node rows, as in TransformerConv.

For the edges :math:`e` of each of R destinations, with heads :math:`h` of C columns :math:`c`,

.. math::
    s_{e, h} = \\lambda \\Big(t_{e, h} + \\sum_c a_{p(e), h, c} \\, b_{r(e), h, c}\\Big), \\qquad
    w_{q(e), h} = \\exp(s_{e, h}) \\Big/ \\sum_{f \\in r(e)} \\exp(s_{f, h})

(Shi et al., `Masked Label Prediction <https://arxiv.org/abs/2009.03509>`_, equation 3), where
:math:`t` is the term of the edge's features, if it has any. Edges, weights and tensors are as in
:mod:`gact_graph.ops.attention`. Kernels materialize no row of an edge.

The gradient of the dot products is a gradient of weights:
:mod:`gact_graph.ops.weighted_sum` computes the gradients of a and b from it. Dropout is a separate
operator, because such layers also return their weights before dropout.
"""

from typing import Final

from gact_graph.ops.reference import dot_attention as reference
from gact_graph.ops.registration import dispatched

dot_attention: Final = dispatched(reference.dot_attention)
dot_attention_backward: Final = dispatched(reference.dot_attention_backward)
drop_weights: Final = dispatched(reference.drop_weights)
