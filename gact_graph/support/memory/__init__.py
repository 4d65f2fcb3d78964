"""Memory of freed tensors on a CPU.

- ``policy``: decides which memory is kept and which returns to the system.
- ``heap``: requests to the C library.
- ``limits``: limits of the system for the address space of a process.

Measuring the memory in use is the task of :mod:`gact_graph.support.peak`.
"""
