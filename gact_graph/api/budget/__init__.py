"""A memory budget: what a step would take in each way to train, and the first way that fits.

- ``sizes``: amounts of memory as a user writes them.
- ``ways``: the ways, the least lossy first.
- ``miniature``: smaller graphs with the proportions of the given one.
- ``measuring``: how much a piece of work takes at most.
- ``trial``: steps of a copy of the model on one of these.
- ``growth``: how what a step takes grows with the graph.
- ``estimate``: a table of all ways.
- ``runs``: on which shares of the graph a way is tried.
- ``trying``: fills it.
- ``budget``: keeps a wrapped model within its budget.
"""
