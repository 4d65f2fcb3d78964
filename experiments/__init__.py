"""Experiments: the main job :mod:`experiments.node_cls` and one command per study.

Shared parts are in :mod:`experiments.helpers`, the networks in :mod:`experiments.models`.
The package is not part of the installed wheel: run ``python -m experiments.node_cls`` from the root
of the repository.
"""
