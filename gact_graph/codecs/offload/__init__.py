"""Level ``L2``: contexts wait for backward in host memory, those of a CPU in files.

Here: the swap in both directions, its memory, and its streams. Not here: which tensors are
encoded, and how.
"""
