"""Message passing in blocks of destination nodes, with no message tensor for all edges at once.

In the order in which a call of ``propagate`` or ``edge_updater`` meets the files:

- ``layers``: the patches that replace these two methods of a layer; ``meta_layer``: the edge model
  of a ``MetaLayer``; ``by_hand``: functions in place of layers; ``edge_work``: their common part.
- ``supported``, ``arguments``, ``sort_arguments``, ``collector``: the arguments of the call, and
  how a block takes its part of them.
- ``analyses``: one analysis for each state of a layer. ``trace`` makes the graph of the operations
  that the layer runs; ``locality`` proves by a rule for each operation that blocks give the rows of
  the whole graph; ``analysis`` asks the graph what backward reads and what stock autograd saves;
  ``match_sum`` and ``match_attention`` recognise graphs for which there are operators.
- ``order``, ``orders``, ``cuts``, ``size``: the edges sorted by destination and by source, and cut
  into blocks.
- ``function``, ``call``, ``outputs``, ``backward``, ``double_backward``: the call as one operation
  of autograd, whose blocks run parts of the traced graph (``graph``).
- ``sums``: weighted sums of source rows; ``attention`` with ``edge_attention``, ``dot_attention``:
  the attention of GAT, GATv2 and TransformerConv, from tensors of nodes.
- ``rows``, ``coded``: reading rows of tensors, also of node tensors that stay quantized.

Not here: operators (``ops``) and whole layers that are computed again (``recompute``).
"""
