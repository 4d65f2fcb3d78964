"""Bits for each slot: measured, decided, and measured once more while training goes on.

In the order in which they serve one measurement:

- ``adaptation``: when to measure.
- ``agreement``: the same bits on all ranks of ``DistributedDataParallel``.
- ``sensitivity``: how much the noise of each slot moves the gradient.
- ``allocator``: the integer program that turns sensitivities into bits.
- ``scheme``: the bits in force, and all that was measured.
- ``state_checks``: whether a saved state can be loaded.

Not here: code that encodes, or that knows a kind of layer.
"""
