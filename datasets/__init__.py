"""Graphs for node classification: each data set has a loader that returns a :class:`Graph`.

.. code-block:: python

    from datasets import load

    graph = load("digits")                 # bundled with scikit-learn, nothing to download
    graph = load("synthetic:reddit@0.1")   # Reddit's counts, a tenth of its size
    graph = load("cora.npz")               # any file in the schema of :mod:`datasets.npz`
"""

from datasets.errors import DatasetError
from datasets.graph import Graph
from datasets.registry import NAMES, load

__all__ = ["NAMES", "DatasetError", "Graph", "load"]
