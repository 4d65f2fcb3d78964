"""Experiments: the main job :mod:`experiments.node_cls` and one command a study.

Shared parts are in :mod:`experiments.helpers`, the networks in :mod:`experiments.models`.
Not part of the installed wheel: run from the repository's root, ``python -m experiments.node_cls``.
"""
