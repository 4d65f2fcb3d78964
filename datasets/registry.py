"""The loaders of all data sets, by name."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path

from datasets.arxiv import load_arxiv
from datasets.digits import load_digits
from datasets.errors import DatasetError
from datasets.graph import Graph
from datasets.npz import load_npz
from datasets.planetoid import FOLDERS, load_planetoid
from datasets.saint import CLASSES, load_saint
from datasets.synthetic import load_synthetic

LOADERS: dict[str, Callable[[Path], Graph]] = {
    "digits": lambda root: load_digits(),
    "ogbn-arxiv": load_arxiv,
    **{name: partial(load_saint, name) for name in CLASSES},
    **{name: partial(load_planetoid, name) for name in FOLDERS},
}
NAMES = tuple(LOADERS)


def load(spec: str, root: str | Path = "data") -> Graph:
    r"""Load a graph.

    Args:
        spec (str): What to load:

            - :obj:`"digits"`: bundled with scikit-learn, nothing to download
            - another of :obj:`NAMES`: the real data set, from :obj:`root` or else downloaded
            - a path that ends in :obj:`.npz`: see :func:`~datasets.npz.load_npz`
            - :obj:`"synthetic:NAME"`, :obj:`"synthetic:NAME@SCALE"`: a synthetic graph of its size,
              see :func:`~datasets.synthetic.block_model`
        root (str or Path, optional): Folder of the real data sets, created by the first download.
            (default: :obj:`"data"`)

    Raises:
        DatasetError: If :obj:`spec` is none of these, or the data set cannot be loaded. No partial
            files remain.
    """
    if spec.endswith(".npz"):
        return load_npz(spec)
    if spec.startswith("synthetic:"):
        return load_synthetic(spec)
    if spec not in LOADERS:
        raise DatasetError(
            f"Expected one of {', '.join(NAMES)}, a path FILE.npz, 'synthetic:NAME' or "
            f"'synthetic:NAME@SCALE' (got {spec!r})"
        )
    return LOADERS[spec](Path(root).expanduser().absolute())
