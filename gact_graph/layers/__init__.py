"""Other ways to run a layer, so that a process needs less memory.

- ``recompute``: layers that are computed again in backward from their inputs.
- ``blocks``: message passing for one block of destination nodes after another.
- ``halo``: one graph over several processes.

Not here: what is saved while a layer runs (``capture``), and how it is kept (``codecs``).
"""
