"""One training forward: the saved tensors, their operations, and the parts that backward reads.

Here: the session, which takes each saved tensor; the trace, which names it; the tables of the parts
that backward reads; the ledger, which counts bytes; and the hooks on modules. Not here: the codecs
(``codecs``), and the number of bits that a tensor gets (``adaptive``).

The path of a saved tensor: ``session`` gets it from autograd and holds it until the operation that
``trace`` has recorded returns. The autograd node names it (``nodes``), and ``operations`` has the
part of it that backward reads. It is kept by reference (``owned``), computed again (``recipes``),
found in ``cache`` by its elements, or encoded. ``ledger`` counts the bytes.
"""
