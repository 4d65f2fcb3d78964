"""Level ``L2``: encoded contexts wait for backward in host memory.

Here: the swap in both directions, the pinned memory that it uses, and the streams that it runs on.
Not here: what is encoded, and how.
"""
