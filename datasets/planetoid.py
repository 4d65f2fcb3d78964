"""The loader of Planetoid's citation graphs, through PyG's class."""

from __future__ import annotations

from pathlib import Path

from datasets.cache import load_cached
from datasets.graph import Graph

PARTS = ("x", "tx", "allx", "y", "ty", "ally", "graph", "test.index")
FOLDERS = {"cora": "Cora", "citeseer": "CiteSeer", "pubmed": "PubMed"}


def load_planetoid(name: str, root: Path) -> Graph:
    r"""Load Cora, CiteSeer or PubMed from the `"Revisiting Semi-Supervised Learning with Graph
    Embeddings" <https://arxiv.org/abs/1603.08861>`_ paper.

    Args:
        name (str): :obj:`"cora"`, :obj:`"citeseer"` or :obj:`"pubmed"`.
        root (Path): Folder that contains :obj:`Cora/`, :obj:`CiteSeer/` or :obj:`PubMed/`. If that
            is missing, the files are downloaded from GitHub.

    Returns:
        A symmetric :class:`~datasets.Graph` with raw features and the public split, which uses
        only some of the nodes.

    Raises:
        DatasetError: If files are missing and cannot be downloaded, or cannot be read.
    """

    def read(home: Path) -> Graph:
        from torch_geometric.datasets import Planetoid

        dataset = Planetoid(str(home.parent), FOLDERS[name])
        data = dataset[0]
        return Graph(
            name=name,
            x=data.x,
            edge_index=data.edge_index,
            y=data.y,
            num_classes=dataset.num_classes,
            train_idx=data.train_mask.nonzero().view(-1),
            val_idx=data.val_mask.nonzero().view(-1),
            test_idx=data.test_mask.nonzero().view(-1),
        )

    raw_files = [f"raw/ind.{name}.{part}" for part in PARTS]
    return load_cached(name, root / FOLDERS[name], raw_files, "processed/data.pt", read)
