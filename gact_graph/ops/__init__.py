"""Operators on tensors: the quantizer, bit masks, sums over edges and attention weights.

- ``reference``: a function in pure torch declares each operator; ``registration``, ``shapes`` and
  ``checks``: its schema, and the checks of its arguments.
- ``quantize``, ``bitmask``, ``bernoulli``, ``batch_norm``, ``weighted_sum``, ``attention``,
  ``leaky_attention``, ``dot_attention``: the typed front of the operators.
- ``cpu``: kernels for the CPU; ``cuda``, ``cuda_edges``, ``cuda_sums``, ``cuda_attention``: for
  CUDA; ``kernels``: compiles, loads and caches both.
- ``allocator``, ``allocations``: the optional library of memory on a CPU, and its counters.

Not here: models, graph networks and autograd.

Importing this package registers every operator.
"""

from gact_graph.ops import cuda, cuda_edges

__all__ = ["cuda", "cuda_edges"]
