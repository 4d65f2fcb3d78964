"""Message passing in blocks of destination nodes, with no message tensor for all edges at once.

In the order in which a call of ``propagate`` or ``edge_updater`` meets the files:

- ``layers``: the patches that replace these two methods of a layer, and the forward of a
  ``MetaLayer``; ``functional``: functions in place of layers; ``edge_work``: a call, from its
  arguments to its result.
- ``sort_arguments``, ``arguments``: the arguments of the call, the part of each that a block reads,
  and their gradients.
- ``analysis``: one analysis for each state of a layer. ``trace`` makes the graph of the operations
  that the layer runs; ``locality`` proves by a rule for each operation that blocks give the rows of
  the whole graph; ``analysis`` asks the graph which inputs backward reads and which tensors stock
  autograd saves; ``match_sum`` and ``match_attention`` recognize graphs for which operators exist.
- ``order``: the edges sorted by destination and by source, and cut into blocks; ``cutting``: orders
  and sums that the calls of a model share; ``recent``: the cache of both.
- ``function``, ``call``, ``backward``: the call as one operation of autograd, whose
  blocks run parts of the traced graph (``graph``).
- ``weighted_sum``: weighted sums of source rows; ``attention``, ``dot_attention`` and
  ``edge_features``: the attention of GAT, GATv2 and TransformerConv, from tensors of nodes.
- ``sparse_product``: products with sparse matrices; ``constant_sums``: sums of rows that training
  does not change.
- ``compiled``, ``graph_operators``, ``graph_work``: edge work in compiled graphs.
- ``rows``: reading and writing rows of tensors, also of node tensors that stay quantized.

Not here: operators (``ops``) and whole layers that are computed again (``recompute``).
"""
