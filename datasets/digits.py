"""Handwritten digits as a graph: a small, real data set that scikit-learn bundles."""

from __future__ import annotations

import torch

from datasets.graph import Graph
from datasets.split import random_split

NUM_NEIGHBORS = 8
MAX_INK = 16  # each pixel counts the inked cells of a 4 x 4 block


def load_digits() -> Graph:
    r"""Load the 8 x 8 images of handwritten digits that scikit-learn bundles.

    Each image is a node. Edges in both directions join two images if one of them is among the 8
    nearest neighbors of the other in Euclidean distance. Nothing is downloaded.

    Returns:
        A symmetric :class:`~datasets.Graph` without self-loops: 1,797 nodes, 64 features in
        [0, 1], 10 classes, and the seeded split of :func:`~datasets.split.random_split`.
    """
    # Imported here: scikit-learn takes a second, and no other loader needs it.
    from sklearn.datasets import load_digits as bundled_digits
    from sklearn.neighbors import kneighbors_graph

    pixels, labels = bundled_digits(return_X_y=True)
    nearest = kneighbors_graph(pixels, NUM_NEIGHBORS, include_self=False)
    edges = nearest.maximum(nearest.T).tocoo()
    train_idx, val_idx, test_idx = random_split(len(labels))
    return Graph(
        name="digits",
        x=torch.from_numpy(pixels).float() / MAX_INK,
        edge_index=torch.stack(
            (torch.from_numpy(edges.row).long(), torch.from_numpy(edges.col).long())
        ),
        y=torch.from_numpy(labels).long(),
        num_classes=10,
        train_idx=train_idx,
        val_idx=val_idx,
        test_idx=test_idx,
    )
