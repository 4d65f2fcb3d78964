"""One training forward: the saved tensors, their operations, and the parts that backward reads.

In the order of a saved tensor's path:

- ``config``: the settings and levels. ``module_hooks``: the module and phase that runs.
- ``trace``: the operation that runs, and a name for its tensors (``call_site``: the Python code
  that called it). ``uncompressed``: forwards that are too small to compress.
- ``session``: takes each tensor from autograd, holds it until its operation has returned, and
  decides its form. ``nodes``: the autograd node that saves it, and the argument that it is.
- ``operations``: the part of it that backward reads, by a table; ``sides``: the comparisons of
  backward; ``derivatives``: operations that save their derivative in place of their argument.
- ``owned``: tensors that are kept by reference. ``recipes``: results that are computed again.
  ``masks``: one bit per element. ``cache``: elements that are encoded already. ``noise``: the seeds
  of the others.
- ``ledger``, ``moments``: the bytes of a forward, and the memory from one saved tensor to the next.

Operations with a forward or backward of the library, which need less memory or time:

- ``in_place``, ``batch_norm``, ``dropout``, ``variance``: a backward in decoded memory, noise as
  bits, deviations from the mean.
- ``places``, ``running``, ``postponed``, ``shared_sums``, ``replaced``: results that need no memory
  of their own.

Compiled models: ``compiled``, ``backward_graph``, ``partition``: codes inside of compiled graphs.

Not here: the codecs (``codecs``), and the number of bits that a tensor gets (``adaptive``).
"""
