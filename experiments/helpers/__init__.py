"""The shared parts of the commands, in the order in which they import each other.

- ``values``, ``errors``, ``labels``, ``recipes``, ``data``: settings and graphs
- ``process``, ``cap``, ``allocators``: processes of their own, with a cap or another allocator
- ``train``, ``meters``, ``timing``: steps of a training, under meters or in turn
- ``subjects``, ``levels``, ``strategies``, ``case``, ``runner``: models, ways to train them, trials
- ``draws``, ``moments``, ``algorithm_1``: the noise of compression in a gradient
- ``kept``, ``origin``, ``command``: results that a command goes on from, and the frame of a command
- ``job``, ``markdown``, ``plot``: the main job's seeds and report
- ``comparison``, ``*_tables``, ``result_tables``: tables, on a terminal and on the pages
"""
