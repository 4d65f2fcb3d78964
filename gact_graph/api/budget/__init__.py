"""A memory budget: what a step would take in each way to train, and the first way that fits.

- ``sizes``: amounts of memory as a user writes them.
- ``miniature``: smaller graphs with the proportions of the given one.
- ``estimate``: the ways, what each takes, and a table of them.
- ``trials``: finds what they take, by steps on parts of the graph.
- ``budget``: keeps a wrapped model within its budget.
- ``advice``: the way that would have fitted where CUDA ran out of memory.
"""
