"""Layers that are computed again in backward from their inputs: level ``CB2``.

In the order in which a call of a layer meets them:

- ``layers``: the patch that replaces a layer's ``forward``.
- ``recomputation``: a call, in which autograd saves placeholders that backward fills.
- ``runs``: the run in forward and the run in backward, which reuses results of edge work.
- ``structure``: the call without its tensors.
- ``contexts``: tensors that wait in codes while the layer's backward runs.
- ``saved_bytes``: how much a layer saves, about.

Not here: running edge work in blocks (``layers.blocks``).
"""
