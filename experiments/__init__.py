"""Experiments: the main job :mod:`experiments.node_cls` and one module a study.

Not part of the installed wheel: run from the repository's root, ``python -m experiments.node_cls``.
"""
