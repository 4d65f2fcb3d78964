"""The shared parts of the commands, in the order in which they import each other.

- ``values``, ``errors``, ``tables``, ``recipes``, ``summary``, ``data``, ``levels``: settings,
  graphs, texts
- ``kept``, ``origin``, ``process``, ``ranks``, ``command``: results to continue from, the frame of
  a command, and separate processes, with a cap or another allocator
- ``sampling``, ``train``, ``meters``, ``timing``: steps of a training, under meters or in turn
- ``subjects``, ``strategies``, ``runner``: models, ways to train them, trials
- ``noise``: the noise of compression in a gradient
- ``paper``, ``report``, ``plot``, ``job``: the main job's seeds and report, the paper's numbers
- ``comparison``, ``result_tables``: tables, on a terminal and on the pages
"""
