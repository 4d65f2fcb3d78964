"""Operators on tensors: the quantizer, bit masks, sums over edges and attention weights.

Here: ``reference``, where a function in pure torch declares each operator; the typed front of each
operator; the CPU and CUDA backends; ``allocator``, the optional library of memory on a CPU, and
``allocations``, its counters; and ``kernels``, which loads, compiles and caches libraries.

Not here: models, graph networks and autograd.

Importing this package registers every operator.
"""

from gact_graph.ops import cuda, cuda_edges

__all__ = ["cuda", "cuda_edges"]
