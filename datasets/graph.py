"""One graph with its node features, targets and split."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from datasets.checks import check_edge_index, check_features, check_split, check_targets


@dataclass(frozen=True)
class Graph:
    r"""A graph for node classification, checked when it is created.

    Args:
        name (str): Name of the graph in tables.
        x (Tensor): Node features, as the source has them.
        edge_index (Tensor): Edges, sources in row 0 and targets in row 1, as the source has them:
            a directed graph stays directed.
        y (Tensor): Class ids, or one 0/1 column per class if a node may have several.
        num_classes (int): Number of classes :math:`C`.
        train_idx (Tensor): Node ids to train on; at least one.
        val_idx (Tensor): Node ids to choose the best epoch on.
        test_idx (Tensor): Node ids to report on.

    Shapes:
        - **x:** :math:`(N, F)`, float32
        - **edge_index:** :math:`(2, E)`, int64
        - **y:** :math:`(N)`, int64, or :math:`(N, C)`, float32
        - **train_idx, val_idx, test_idx:** one-dimensional, int64

    Raises:
        DatasetError: If a shape, a dtype or a value is invalid. The message names the field.
    """

    name: str
    x: Tensor
    edge_index: Tensor
    y: Tensor
    num_classes: int
    train_idx: Tensor
    val_idx: Tensor
    test_idx: Tensor

    def __post_init__(self) -> None:
        check_features(self.x)
        check_edge_index(self.edge_index, self.num_nodes)
        check_targets(self.y, self.num_nodes, self.num_classes)
        check_split(self.train_idx, self.val_idx, self.test_idx, self.num_nodes)

    @property
    def num_nodes(self) -> int:
        r"""Return the number of nodes :math:`N`."""
        return self.x.size(0)

    @property
    def num_edges(self) -> int:
        r"""Return the number of edges :math:`E`; an undirected edge counts twice."""
        return self.edge_index.size(1)

    @property
    def multi_label(self) -> bool:
        r"""Return :obj:`True` if a node may belong to several classes."""
        return self.y.dim() == 2
