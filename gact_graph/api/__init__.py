"""The public functions, and the controller of a wrapped model.

Here: ``wrap`` and its companions, the tracked methods and their patches, memory budgets, the
report, and the controller, which connects all other packages. Not here: the handling of single
tensors (``capture``, ``codecs``).
"""
