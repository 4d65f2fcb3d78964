"""Operators on tensors: the quantizer, bit masks, and sums of weighted rows.

Here: one file an operator, and beside them the backends (pure torch in ``reference``, ``cpu``,
``cuda``) and what builds and keeps kernels (``kernels``). Not here: anything that knows a model, a
graph network or autograd.
"""
