"""One training forward: which tensors autograd saves, for which operation, and what backward reads.

Here: the session, which takes each saved tensor; the trace, which names it; the tables of what
operations read; the ledger, which counts bytes; and the hooks on modules. Not here: how a tensor is
encoded (``codecs``) or how many bits it gets (``adaptive``).

A saved tensor goes this way: ``session.pack`` gets it from autograd, ``trace`` knows the operation
that saves it, and ``deferred`` holds it until that has returned. Then ``nodes`` finds the autograd
node that names it, ``operations`` has what backward reads of it, ``held`` and ``allowance`` whether
it is kept as it is, ``gathers`` whether it can be gathered again, ``known`` whether its elements
were encoded before. If not, ``encoder`` asks the codecs and ``ledger`` counts the bytes.
"""
