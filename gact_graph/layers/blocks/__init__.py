"""Message passing by blocks of destination nodes, with no message tensor for all edges at once.

In the order in which a call of ``propagate`` or ``edge_updater`` meets them:

- ``layers``: the patches that replace these two methods of a layer; ``meta_layer``: what they
  replace of a ``MetaLayer``; ``edge_work``: what all of them do.
- ``by_hand``, with ``reached``, ``collector``: functions in place of layers.
- ``supported``, ``arguments``, ``sort_arguments``: what the call is given, and how a block takes
  its part of it.
- ``findings``, with ``sample``, ``probe``, ``flow``, ``steps``, ``state``, ``never_read``: what the
  layer does, found out on a small graph and remembered.
- ``order``, ``orders``, ``cuts``, ``size``: the edges sorted by destination and by source, and cut
  into blocks.
- ``function``, ``call``, ``outputs``, ``backward``: the call as one operation of autograd, its
  forward and its backward; ``edge_functions``: what runs for each block.
- ``sums``: layers that add up weighted source rows, for which no message is made at all;
  ``attention``, with ``edge_attention``, ``dot_attention``, ``find_attention``: the attention of
  GAT, GATv2 and TransformerConv, from tensors of nodes.
- ``rows``, ``coded``: reading rows of tensors, also of node tensors that stay quantized.

Not here: operators (``ops``) and whole layers that are computed again (``recompute``).
"""
