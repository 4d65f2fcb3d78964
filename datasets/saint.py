"""The loader of three graphs of the GraphSAINT paper, through PyG's classes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from datasets.cache import load_cached
from datasets.graph import Graph
from datasets.published import PUBLISHED

RAW_FILES = ("raw/adj_full.npz", "raw/feats.npy", "raw/class_map.json", "raw/role.json")
# Reddit2 is GraphSAINT's Reddit: 23 M edges, against 114 M in PyG's Reddit.
CLASSES = {"flickr": "Flickr", "reddit": "Reddit2", "yelp": "Yelp"}


def load_saint(name: str, root: Path) -> Graph:
    r"""Load Flickr, Reddit or Yelp from the `"GraphSAINT: Graph Sampling Based Inductive Learning
    Method" <https://arxiv.org/abs/1907.04931>`_ paper.

    Args:
        name (str): :obj:`"flickr"`, :obj:`"reddit"` or :obj:`"yelp"`.
        root (Path): Folder that contains the folder named after the PyG class: :obj:`Flickr/`,
            :obj:`Reddit2/` or :obj:`Yelp/`. If that is missing, the files are downloaded from
            Google Drive.

    Returns:
        A :class:`~datasets.Graph` with raw features and the published split; multi-label for Yelp.

    Raises:
        DatasetError: If files are missing and cannot be downloaded, or cannot be read.
    """

    def read(home: Path) -> Graph:
        from torch_geometric import datasets as pyg

        dataset: Any = getattr(pyg, CLASSES[name])(str(home))
        data = dataset[0]
        return Graph(
            name=name,
            x=data.x,
            edge_index=data.edge_index,
            y=data.y.float() if PUBLISHED[name].multi_label else data.y,
            num_classes=dataset.num_classes,
            train_idx=data.train_mask.nonzero().view(-1),
            val_idx=data.val_mask.nonzero().view(-1),
            test_idx=data.test_mask.nonzero().view(-1),
        )

    return load_cached(name, root / CLASSES[name], RAW_FILES, "processed/data.pt", read)
