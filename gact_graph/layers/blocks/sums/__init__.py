"""Layers whose result is a weighted sum of source rows: they run without making messages.

The message of GCN, GAT, GATv2 and TransformerConv (without edge features) is a product, and
``propagate`` adds the products up for each destination node i:

    out_i = sum over edges e to i of  weight_e * x[source_e]

Stock PyG makes all products, a tensor of messages [E, heads, channels]. Here only the weights
[E, heads, 1] exist, and an operator of :mod:`gact_graph.ops.weighted_sum` reads the rows of x where
they lie, in forward and in backward. Three steps lead there:

- ``find``: is the message such a product? Found by data flow, once for each state of a layer: the
  layer's ``message`` runs on a small graph, and labels on the values of x tell whether they go
  anywhere but into that product. No kind of layer is known by name.
- ``products``: finds the product among all operations that ``message`` runs. In training it leaves
  the product out: ``message`` runs on a placeholder for the rows of x, and its weights remain.
- ``weighted_sum``: the sums of one block from the weights, and their gradients.

A layer may do something else in a later call, so each block compares the operations that
``message`` runs with those that were found; where they differ, the messages are made.
"""
