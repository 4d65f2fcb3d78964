"""A memory budget: what a step would take in each way to train, and the first way that fits.

- ``budget``: keeps a wrapped model within its budget.
- ``estimate``: the ways, what each takes, and a table of them.
- ``trials``: on which parts of the graph ways are tried, and what the whole takes by them.
- ``steps``: training steps of a copy of the model on a part, and the memory that they take.
- ``miniature``: the inputs of a part.
"""
