"""The loader of graphs from `.npz` files."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from datasets.archive import Arrays, read_arrays
from datasets.checks import check_features
from datasets.errors import DatasetError, first_line
from datasets.graph import Graph
from datasets.memory import check_fits
from datasets.split import random_split

SPLIT_KEYS = ("train_idx", "val_idx", "test_idx")
CSR_KEYS = ("x_data", "x_indices", "x_indptr", "x_shape")
KEYS = ("edge_index", "x", *CSR_KEYS, "y", *SPLIT_KEYS)
_INT64_MAX = 2**63 - 1

# Class ids may have gaps, but a model's output has a column for each id, so more classes than this
# number and than nodes are refused.
_MANY_CLASSES = 65_536


def load_npz(path: str | Path) -> Graph:
    r"""Load a graph from an :obj:`.npz` file, without unpickling anything.

    Args:
        path (str or Path): A file with these arrays, of any width:

            - :obj:`edge_index` :math:`(2, E)`, integer: edges, sources in row 0
            - :obj:`x` :math:`(N, F)`, or in its place the CSR arrays :obj:`x_data`,
              :obj:`x_indices`, :obj:`x_indptr` and :obj:`x_shape` :math:`= (N, F)`
            - :obj:`y` :math:`(N)` integer class ids, or :math:`(N, C)` zeros and ones
            - :obj:`train_idx`, :obj:`val_idx`, :obj:`test_idx`, integer node ids; if all three are
              absent, the seeded split of :func:`~datasets.split.random_split`

    Returns:
        A :class:`~datasets.Graph` named after the file. Its number of classes is the number of
        columns of :obj:`y` or, for ids, the highest id plus one.

    Raises:
        DatasetError: If the file is missing or broken. The message names the file and the key.
    """
    try:
        path = Path(path).expanduser()
        return _graph(path.stem, read_arrays(path, KEYS))
    except (DatasetError, RuntimeError, MemoryError) as error:
        # Python and torch raise errors of their own without a home folder or enough memory.
        raise DatasetError(f"{path}: {_told(error)}") from error


def _told(error: Exception) -> str:
    if isinstance(error, DatasetError):
        return str(error)
    return f"Expected a graph that this machine can load (got {first_line(error)})"


def _graph(name: str, arrays: Arrays) -> Graph:
    x = _features(arrays)
    check_features(x)  # here as well as in Graph: the split below needs its rows
    y, num_classes = _targets(_require(arrays, "y"), x.size(0))
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
    """Expand CSR arrays into a dense matrix; duplicate entries add up, as usual for CSR."""
    shape = _integers("x_shape", x_shape)
    if shape.shape != (2,) or int(shape.min()) < 1:
        raise DatasetError(
            f"Expected x_shape to be two positive counts, N and F (got {_few(shape)})"
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
    ends = int(indptr[0]), int(indptr[-1])
    # The bounds are needed too: a very large negative step overflows and becomes positive.
    low, high = (int(bound) for bound in indptr.aminmax())
    if ends != (0, data.numel()) or (low, high) != ends or int(counts.min()) < 0:
        raise DatasetError(
            f"Expected x_indptr to rise from 0 to {data.numel()}, the length of x_data "
            f"(got {ends[0]} to {ends[1]}, smallest step {int(counts.min())})"
        )
    check_fits(
        f"x of {num_nodes} x {num_features} numbers, by x_shape,",
        4 * num_nodes * num_features,
        "take fewer features",
    )
    rows = torch.repeat_interleave(counts)
    x = torch.zeros(num_nodes, num_features)
    return x.index_put_((rows, columns), data, accumulate=True)


def _targets(y: np.ndarray, num_nodes: int) -> tuple[Tensor, int]:
    if y.ndim == 2:
        return _floats("y", y), y.shape[1]
    ids = _integers("y", y)
    num_classes = int(ids.max()) + 1 if ids.numel() else 0
    if num_classes > max(num_nodes, _MANY_CLASSES):
        raise DatasetError(
            f"Expected class ids in y that count the classes from 0 (got {num_classes - 1} among "
            f"{num_nodes} nodes); number them with numpy.unique(y, return_inverse=True)"
        )
    return ids, num_classes


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


def _few(numbers: Tensor) -> str:
    """Return the numbers as text, or their shape if there are many."""
    return str(numbers.tolist() if numbers.numel() <= 4 else f"the shape {list(numbers.shape)}")


def _integers(key: str, array: np.ndarray) -> Tensor:
    if array.dtype.kind not in "iu":
        raise DatasetError(f"Expected integers in {key} (got {array.dtype})")
    if array.dtype.kind == "u" and array.size and int(array.max()) > _INT64_MAX:
        raise DatasetError(f"Expected integers below 2^63 in {key} (got {array.max()})")
    return torch.from_numpy(array.astype(np.int64))


def _floats(key: str, array: np.ndarray) -> Tensor:
    if array.dtype.kind not in "fiub":
        raise DatasetError(f"Expected real numbers in {key} (got {array.dtype})")
    # A float64 beyond float32 becomes Inf, which the check of x reports.
    with np.errstate(over="ignore"):
        return torch.from_numpy(array.astype(np.float32))
