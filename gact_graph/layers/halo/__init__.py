"""One graph over several processes: each has some nodes, and fetches the rows of others it reads.

- ``parts``: which nodes and edges are whose, and which rows go where.
- ``exchange``: the rows of nodes that others have, with a gradient.
- ``layers``: layers that fetch them before their edge work runs.
- ``gcn_norm``: GCN's normalisation by the degrees of nodes, those of others too.
- ``norm``: batch norm over the nodes of all parts.
- ``local``: which layers can run on a part.
- ``tried``: layers that it does not know, tried at their first forward.

Not here: gradients of parameters, which ``gact_graph.distributed.sum_gradients`` adds up.
"""
