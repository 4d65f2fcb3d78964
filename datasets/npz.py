"""Any graph in one `.npz` file."""

from __future__ import annotations

from pathlib import Path
from typing import BinaryIO

import numpy as np
import torch
from numpy.lib.npyio import NpzFile
from torch import Tensor

from datasets.errors import DatasetError, first_line
from datasets.graph import Graph
from datasets.split import random_split

SPLIT_KEYS = ("train_idx", "val_idx", "test_idx")
CSR_KEYS = ("x_data", "x_indices", "x_indptr", "x_shape")
Arrays = dict[str, np.ndarray]


def load_npz(path: str | Path) -> Graph:
    r"""Loads a graph from an :obj:`.npz` file, without unpickling anything.

    Args:
        path (str or Path): A file with these arrays, of any width:

            - :obj:`edge_index` :math:`(2, E)`, integer: arcs, sources in row 0
            - :obj:`x` :math:`(N, F)`, or in its place the CSR arrays :obj:`x_data`,
              :obj:`x_indices`, :obj:`x_indptr` and :obj:`x_shape` :math:`= (N, F)`
            - :obj:`y` :math:`(N)` integer class ids, or :math:`(N, C)` zeros and ones
            - :obj:`train_idx`, :obj:`val_idx`, :obj:`test_idx`, integer node ids; where all three
              are absent, the seeded split of :func:`~datasets.split.random_split`

    Returns:
        A :class:`~datasets.Graph` that is named as the file. It has as many classes as :obj:`y`
        has columns or, for ids, one more than the highest.

    Raises:
        DatasetError: If the file is missing or broken. The message names the file and the key.
    """
    path = Path(path).expanduser()
    try:
        return _graph(path.stem, _read(path))
    except DatasetError as error:
        raise DatasetError(f"{path}: {error}") from error


def _read(path: Path) -> Arrays:
    # Opened here: numpy does not close what it opened itself and then found to be no archive.
    try:
        file = path.open("rb")
    except OSError as error:
        raise DatasetError(
            f"Expected an .npz file there (got {first_line(error)}); check the path"
        ) from error
    with file:
        archive = _archive(file)
        known = {"edge_index", "x", *CSR_KEYS, "y", *SPLIT_KEYS}
        return {key: _array(archive, key) for key in known.intersection(archive.files)}


# Damaged bytes make numpy, zipfile, zlib or Python's tokenizer stumble, each with errors of its
# own; there is no list that the two functions below could name.
def _archive(file: BinaryIO) -> NpzFile:
    try:
        archive = np.load(file, allow_pickle=False)
    except Exception as error:
        raise DatasetError(
            f"Expected a readable .npz file (got {first_line(error)}); write it with numpy.savez"
        ) from error
    if not isinstance(archive, NpzFile):
        raise DatasetError(
            "Expected an .npz archive of named arrays (got a single array); "
            "write it with numpy.savez"
        )
    return archive


def _array(archive: NpzFile, key: str) -> np.ndarray:
    try:
        return archive[key]
    except Exception as error:
        raise DatasetError(
            f"Expected a plain, whole array in {key} (got {first_line(error)})"
        ) from error


def _graph(name: str, arrays: Arrays) -> Graph:
    x = _features(arrays)
    y, num_classes = _targets(_require(arrays, "y"))
    train_idx, val_idx, test_idx = _split(arrays, x.size(0))
    return Graph(
        name=name,
        x=x,
        edge_index=_integers("edge_index", _require(arrays, "edge_index")),
        y=y,
        num_classes=num_classes,
        train_idx=train_idx,
        val_idx=val_idx,
        test_idx=test_idx,
    )


def _require(arrays: Arrays, key: str) -> np.ndarray:
    if key not in arrays:
        raise DatasetError(
            f"Expected the key {key} (got only {', '.join(sorted(arrays)) or 'none'})"
        )
    return arrays[key]


def _features(arrays: Arrays) -> Tensor:
    if "x" in arrays:
        return _floats("x", arrays["x"])
    if not any(key in arrays for key in CSR_KEYS):
        raise DatasetError(
            f"Expected the key x, or {', '.join(CSR_KEYS)} "
            f"(got only {', '.join(sorted(arrays)) or 'none'})"
        )
    return _dense(*(_require(arrays, key) for key in CSR_KEYS))


def _dense(
    x_data: np.ndarray, x_indices: np.ndarray, x_indptr: np.ndarray, x_shape: np.ndarray
) -> Tensor:
    """Expands CSR arrays; entries of one place add up, as everywhere with CSR."""
    shape = _integers("x_shape", x_shape)
    if shape.shape != (2,) or int(shape.min()) < 1:
        raise DatasetError(
            f"Expected x_shape to be two positive counts, N and F (got {x_shape.tolist()})"
        )
    num_nodes, num_features = shape.tolist()
    data = _floats("x_data", x_data)
    columns = _integers("x_indices", x_indices)
    if data.dim() != 1 or columns.shape != data.shape:
        raise DatasetError(
            f"Expected x_data and x_indices to be lists of one length "
            f"(got {list(data.shape)} and {list(columns.shape)})"
        )
    if columns.numel() and not 0 <= int(columns.min()) <= int(columns.max()) < num_features:
        raise DatasetError(
            f"Expected columns from 0 to {num_features - 1} in x_indices, by x_shape "
            f"(got {int(columns.min())} to {int(columns.max())})"
        )
    indptr = _integers("x_indptr", x_indptr)
    if indptr.shape != (num_nodes + 1,):
        raise DatasetError(
            f"Expected {num_nodes + 1} entries in x_indptr, one more than x_shape has rows "
            f"(got {list(indptr.shape)})"
        )
    counts = indptr.diff()
    if int(indptr[0]) != 0 or int(indptr[-1]) != data.numel() or int(counts.min()) < 0:
        raise DatasetError(
            f"Expected x_indptr to rise from 0 to {data.numel()}, the length of x_data "
            f"(got {int(indptr[0])} to {int(indptr[-1])}, smallest step {int(counts.min())})"
        )
    rows = torch.repeat_interleave(counts)
    x = torch.zeros(num_nodes, num_features)
    return x.index_put_((rows, columns), data, accumulate=True)


def _targets(y: np.ndarray) -> tuple[Tensor, int]:
    if y.ndim == 2:
        return _floats("y", y), y.shape[1]
    ids = _integers("y", y)
    return ids, int(ids.max()) + 1 if ids.numel() else 0


def _split(arrays: Arrays, num_nodes: int) -> tuple[Tensor, Tensor, Tensor]:
    present = [key for key in SPLIT_KEYS if key in arrays]
    if not present:
        return random_split(num_nodes)
    # Completing a partial split would have to guess which nodes the author meant to keep out.
    if len(present) < len(SPLIT_KEYS):
        raise DatasetError(
            f"Expected all of {', '.join(SPLIT_KEYS)}, or none for a random split "
            f"(got only {', '.join(present)})"
        )
    train_idx, val_idx, test_idx = (_integers(key, arrays[key]) for key in SPLIT_KEYS)
    return train_idx, val_idx, test_idx


def _integers(key: str, array: np.ndarray) -> Tensor:
    if array.dtype.kind not in "iu":
        raise DatasetError(f"Expected integers in {key} (got {array.dtype})")
    return torch.from_numpy(array.astype(np.int64))


def _floats(key: str, array: np.ndarray) -> Tensor:
    if array.dtype.kind not in "fiub":
        raise DatasetError(f"Expected real numbers in {key} (got {array.dtype})")
    # A float64 beyond float32 turns into Inf, which the check of x then names.
    with np.errstate(over="ignore"):
        return torch.from_numpy(array.astype(np.float32))
