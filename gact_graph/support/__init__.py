"""Small helpers that any package of the library may use, and that import none of them.

- ``current``, ``scopes``: the session that captures on this thread, and values inside a ``with``.
- ``torch_private``, ``versions``: private names of PyTorch, and the versions that are supported.
- ``storage``, ``content``, ``edits``: the identity of storages, equal tensors, and changes behind
  autograd; ``graph``: the nodes of autograd's graph; ``exact``: tensors for returned derivatives.
- ``objects``, ``reach``, ``watch``: the Python state that code depends on; ``run_state``: random
  states and autocast; ``patch``: methods replaced on one instance.
- ``memory``, ``peak``, ``part``, ``clock``: freed memory on a CPU, peaks, parts of a graph, time.
- ``messages``, ``progress``, ``rows``: warnings and advice, the line of slow work, a report's rows.
- ``collective``, ``sharded``, ``symbols``: collective calls, sharded parameters, symbolic sizes.

Not here: anything that belongs to one package alone.
"""
