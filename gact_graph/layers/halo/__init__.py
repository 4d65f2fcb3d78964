"""One graph over several processes: each has a part of the nodes, and fetches rows of the others.

- ``parts``: cuts the graph, and lists the rows to send and to receive.
- ``exchange``: fetches rows of nodes in other parts, with a gradient.
- ``layers``: patches layers so that they fetch these rows before their edge work.
- ``gcn_norm``: GCN's normalization with the degrees of nodes in other parts.
- ``norm``: batch norm over the rows of all parts.
- ``supported``: the layers that can run on a part, and reasons why others cannot.
- ``locality``: a check at the first forward of layers that are not listed.

Not here: the sum of the parameters' gradients (``gact_graph.distributed.sum_gradients``).
"""
