"""The loader of ogbn-arxiv, through OGB's own class."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import Tensor

from datasets.cache import load_cached
from datasets.graph import Graph

RAW_FILES = (
    # Without this file, OGB asks on the terminal whether to update, so it is required.
    "RELEASE_v1.txt",
    "raw/edge.csv.gz",
    "raw/node-feat.csv.gz",
    "raw/node-label.csv.gz",
    "raw/node_year.csv.gz",
    "raw/num-node-list.csv.gz",
    "raw/num-edge-list.csv.gz",
    "split/time/train.csv.gz",
    "split/time/valid.csv.gz",
    "split/time/test.csv.gz",
)


def load_arxiv(root: Path) -> Graph:
    r"""Load ogbn-arxiv from the `"Open Graph Benchmark: Datasets for Machine Learning on Graphs"
    <https://arxiv.org/abs/2005.00687>`_ paper: papers, the papers they cite, and 40 subjects.

    Args:
        root (Path): Folder that contains :obj:`ogbn_arxiv/`. If that is missing, 80 MB are
            downloaded.

    Returns:
        A :class:`~datasets.Graph` with the 1,166,243 citations as directed edges and the official
        split by time.

    Raises:
        DatasetError: If files are missing and cannot be downloaded, or cannot be read.
    """
    # OGB prefers the name that its older versions gave the folder.
    older = root / "ogbn_arxiv_pyg"
    home = older if older.exists() else root / "ogbn_arxiv"
    return load_cached(
        "ogbn-arxiv", home, RAW_FILES, "processed/geometric_data_processed.pt", _read
    )


def _read(home: Path) -> Graph:
    from torch_geometric.data import Data
    from torch_geometric.data.data import DataEdgeAttr, DataTensorAttr
    from torch_geometric.data.storage import GlobalStorage

    with _without_update_check():
        from ogb.nodeproppred import PygNodePropPredDataset

    # OGB pickles a whole Data object, and calls torch.load without weights_only, whose default has
    # changed since. Besides tensors, the file holds only these four classes. Only new ones are
    # passed: on exit, safe_globals also removes classes that PyG had allowed before.
    needed = {Data, DataEdgeAttr, DataTensorAttr, GlobalStorage}
    new = needed.difference(torch.serialization.get_safe_globals())
    with torch.serialization.safe_globals(list(new)):
        dataset = PygNodePropPredDataset(name="ogbn-arxiv", root=str(home.parent))
        split: dict[str, Tensor] = dataset.get_idx_split()
    data = dataset[0]
    return Graph(
        name="ogbn-arxiv",
        x=data.x.float(),
        edge_index=data.edge_index,
        y=data.y.view(-1),
        num_classes=dataset.num_classes,
        train_idx=split["train"],
        val_idx=split["valid"],
        test_idx=split["test"],
    )


@contextmanager
def _without_update_check() -> Iterator[None]:
    """Hide the package through which `import ogb` asks PyPI, on a thread that blocks exit."""
    absent = object()
    before = sys.modules.get("outdated", absent)
    sys.modules["outdated"] = None  # type: ignore[assignment]
    try:
        yield
    finally:
        del sys.modules["outdated"]
        if before is not absent:
            sys.modules["outdated"] = before  # type: ignore[assignment]
