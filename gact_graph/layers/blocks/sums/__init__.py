"""Weighted sums of source rows, computed without messages.

``weighted_sum`` has the sums of one block and of the whole graph, and their gradients; ``passes``
runs over all edges. ``gact_graph.layers.blocks.match_sum`` finds the layers that compute such sums.
"""
