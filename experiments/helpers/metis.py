"""METIS from pymetis for PyG's ClusterLoader, which looks for METIS in pyg-lib."""

from __future__ import annotations

import importlib.util
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor


def is_there() -> bool:
    """Return whether PyG can cut graphs, by itself or with :func:`provide`."""
    return any(map(importlib.util.find_spec, ("pyg_lib", "pymetis")))


def provide() -> None:
    """Provide METIS to PyG, if pyg-lib is not installed and pymetis is."""
    import torch_geometric.typing
    from torch_geometric.loader import cluster

    if torch_geometric.typing.WITH_METIS or importlib.util.find_spec("pymetis") is None:
        return
    torch_geometric.typing.WITH_METIS = True
    cluster.pyg_lib = SimpleNamespace(partition=SimpleNamespace(metis=_metis))


def _metis(rowptr: Tensor, col: Tensor, num_partitions: int, recursive: bool) -> Tensor:
    import pymetis

    xadj, adjncy = rowptr.numpy(), col.numpy()
    partition: Any = pymetis.part_graph(
        num_partitions, xadj=xadj, adjncy=adjncy, recursive=recursive
    )
    return torch.as_tensor(partition[1])
