"""The published sizes of the data sets, for synthetic graphs of the same sizes."""

from __future__ import annotations

from typing import NamedTuple


class Size(NamedTuple):
    """Counts of one data set.

    Args:
        nodes (int): Number of nodes.
        edges (int): Number of edges; both directions of an undirected edge count.
        features (int): Number of features per node.
        classes (int): Number of classes.
        multi_label (bool, optional): Whether a node may have several classes.
            (default: :obj:`False`)
    """

    nodes: int
    edges: int
    features: int
    classes: int
    multi_label: bool = False


PUBLISHED = {
    # The only directed graph: 1,166,243 citations, each counted once.
    "ogbn-arxiv": Size(169_343, 1_166_243, 128, 40),
    "flickr": Size(89_250, 899_756, 500, 7),
    "reddit": Size(232_965, 23_213_838, 602, 41),
    "yelp": Size(716_847, 13_954_819, 300, 100, multi_label=True),
    "cora": Size(2_708, 10_556, 1_433, 7),
    "citeseer": Size(3_327, 9_104, 3_703, 6),
    "pubmed": Size(19_717, 88_648, 500, 3),
}
