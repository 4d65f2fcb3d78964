"""Memory of freed tensors on a CPU.

- ``policy``: decides what is kept, what goes back to the system, and from which size on.
- ``heap``: what the C library can be asked to do.

Not here: measuring how much memory is in use.
"""
