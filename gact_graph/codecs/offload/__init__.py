"""Level ``L2``: contexts wait for backward in host memory, those of a CPU in files.

- ``swap``: the contexts on their way out and back. ``pinned``, ``files``: the memory in which they
  wait. ``streams``: copies beside the work of a GPU. ``speed``: the time of a byte, for plans.

Not here: which tensors are encoded, and how.
"""
