"""Layers that are computed again in backward from their inputs: level ``CB2``.

In the order in which a call of a layer meets them:

- ``layers``: the patch that replaces a layer's ``forward``.
- ``recomputation``: the first run, in which autograd saves placeholders, and the run in backward
  that computes the tensors that they stand for.
- ``structure``: the call without its tensors.
- ``reuse``: results of edge work that need not be computed once more.
- ``contexts``: tensors that wait in codes while the layer's backward runs.
- ``edits``, ``saved_bytes``: whether an input has changed; how much a layer saves, about.

Not here: running edge work in blocks (``layers.blocks``).
"""
