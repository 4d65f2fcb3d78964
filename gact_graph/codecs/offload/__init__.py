"""Level ``L2``: encoded contexts are stored in host memory until backward.

Here: the swap in both directions, its pinned memory, and its streams. Not here: which tensors are
encoded, and how.
"""
