"""The shared parts of the commands; each group imports mostly from itself and those above it.

- ``values``, ``errors``, ``tables``, ``recipes``, ``summary``, ``data``, ``levels``, ``display``:
  settings, graphs, texts
- ``kept``, ``origin``, ``process``, ``ranks``, ``command``: results to continue from, the frame of
  a command, and separate processes, with a cap or another allocator
- ``sampling``, ``metis``, ``train``, ``fit``, ``meters``, ``timing``, ``steps``: steps of a
  training, under meters or in turn
- ``subjects``, ``peers``, ``strategies``, ``runner``, ``examples``: models, ways to train them,
  trials
- ``gradients``, ``noise``, ``codes``: the noise of compression in a gradient
- ``timeline``, ``network_model``: the tensors alive at a peak, and the traffic of many processes
- ``paper``, ``report``, ``plot``, ``job``: the main job's seeds and report, the paper's numbers
- ``comparison``, ``result_tables``, ``pictures``: tables and pictures, on a terminal and the pages
"""
