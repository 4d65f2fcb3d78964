"""Bits for each slot, from measurements that are repeated during training.

In the order of one measurement:

- ``adaptation``: when to measure.
- ``agreement``: the same bits on all ranks of ``DistributedDataParallel``.
- ``sensitivity``: the effect of each slot's noise on the gradient.
- ``allocator``: the integer program that turns sensitivities into bits.
- ``row_weights``: the weights of the rows of a slot, by which they share its bits.
- ``scheme``: the current bits, and the measurements.
- ``slot_names``: slots of older versions.
- ``state_checks``: whether a saved state can be loaded.

Not here: code that encodes, or that knows a kind of layer.
"""
