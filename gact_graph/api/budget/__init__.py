"""Memory budgets: the peak of a training step under each strategy, and the first that fits.

- ``budget``: keeps a wrapped model within its budget.
- ``estimate``: the strategies, their costs, and the table of both.
- ``trials``: chooses parts of the graph to try strategies on, and extrapolates to the whole.
- ``steps``: trains a copy of the model on a part and measures the peak.
- ``miniature``: makes the inputs of a part.
"""
