"""Layers that are computed again in backward from their inputs: the levels ``CB1`` and ``CB2``.

In the order in which a call of a layer meets them:

- ``layers``: the patch that replaces a layer's ``forward``.
- ``structure``, ``call``: the call without its tensors.
- ``try_out``: whether the layer can be computed again.
- ``function``: the first run, and the operation of autograd that runs the layer again in backward.
- ``contexts``, ``reuse``: while it runs again, how saved tensors are kept, and what need not be
  computed once more.
- ``edits``, ``saved_bytes``: whether an input has changed, and how much a layer saves, about.

Not here: cutting a layer into blocks (``layers.blocks``).
"""
