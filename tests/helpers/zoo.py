"""The convs of PyG as small nets, with every adjacency that they take."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch_geometric.nn as pyg
from samples import seeded
from torch import Tensor, nn
from torch_geometric import EdgeIndex
from torch_geometric.typing import SparseTensor

NODES, EDGES, WIDTH, EDGE_WIDTH, RELATIONS = 300, 2000, 32, 4, 3

# An element is off by at most one part in 255 of the range of its group of 256, which for a bell
# curve is some six deviations: an error of about one in a hundred for each context that a gradient
# is a product of, and the nets here chain several.
BOUND = 0.03

X = torch.randn(NODES, WIDTH, generator=seeded(0))
X0 = torch.randn(NODES, WIDTH, generator=seeded(1))
POSITION = torch.randn(NODES, 3, generator=seeded(2))
NORMAL = nn.functional.normalize(torch.randn(NODES, 3, generator=seeded(3)), dim=-1)
EDGES = torch.randint(NODES, (2, EDGES), generator=seeded(4)).unique(dim=1).contiguous()
WEIGHT = torch.rand(EDGES.size(1), generator=seeded(5)) + 0.1
ATTR = torch.rand(EDGES.size(1), EDGE_WIDTH, generator=seeded(6))
TYPE = torch.randint(RELATIONS, (EDGES.size(1),), generator=seeded(7))
NODE_TYPE = torch.randint(2, (NODES,), generator=seeded(8))
BATCH = torch.arange(NODES) // 60
DEGREES = torch.bincount(torch.bincount(EDGES[1], minlength=NODES))


def edge_list() -> Tensor:
    return EDGES


def edge_index() -> Tensor:
    """PyG's own class, sorted by the destination."""
    return EdgeIndex(EDGES.contiguous(), sparse_size=(NODES, NODES)).sort_by("col")[0]


def csr() -> Tensor:
    """The transposed adjacency as torch's sparse CSR, with weights."""
    indices = EDGES.flip(0)
    with warnings.catch_warnings():
        # torch tells that sparse CSR is beta, and that it does not check what it is given.
        warnings.filterwarnings("ignore", message="Sparse", category=UserWarning)
        return torch.sparse_coo_tensor(indices, WEIGHT, (NODES, NODES)).coalesce().to_sparse_csr()


def sparse() -> Any:
    """The same as torch_sparse's class."""
    return SparseTensor(row=EDGES[1], col=EDGES[0], value=WEIGHT, sparse_sizes=(NODES, NODES))


FORMATS: dict[str, Callable[[], Any]] = {
    "tensor": edge_list,
    "EdgeIndex": edge_index,
    "csr": csr,
    "sparse": sparse,
}
ALL, LISTS = tuple(FORMATS), ("tensor", "EdgeIndex")
NOT_CSR = ("tensor", "EdgeIndex", "sparse")
TENSOR = ("tensor",)


@dataclass(frozen=True)
class Case:
    """A conv, its arguments besides features, and its kinds of adjacency."""

    make: Callable[[], nn.Module]
    formats: Sequence[str] = LISTS
    extra: tuple[Any, ...] = ()
    named: tuple[tuple[str, Any], ...] = ()
    before: tuple[Any, ...] = ()
    bipartite: bool = False


def _mlp(inputs: int, outputs: int) -> nn.Module:
    return nn.Sequential(nn.Linear(inputs, WIDTH), nn.ReLU(), nn.Linear(WIDTH, outputs))


W = WIDTH
CONVS: dict[str, Case] = {
    "GCNConv": Case(lambda: pyg.GCNConv(W, W), ALL),
    "GCNConv weighted": Case(lambda: pyg.GCNConv(W, W), TENSOR, (WEIGHT,)),
    "GCNConv cached": Case(lambda: pyg.GCNConv(W, W, cached=True), ALL),
    "ChebConv": Case(lambda: pyg.ChebConv(W, W, K=3), TENSOR),
    "SAGEConv": Case(lambda: pyg.SAGEConv(W, W), ALL),
    "SAGEConv max": Case(lambda: pyg.SAGEConv(W, W, aggr="max"), ALL),
    "SAGEConv project": Case(lambda: pyg.SAGEConv(W, W, aggr="min", project=True), ALL),
    "SAGEConv std": Case(lambda: pyg.SAGEConv(W, W, aggr="std"), LISTS),
    "SAGEConv softmax": Case(
        lambda: pyg.SAGEConv(W, W, aggr=pyg.SoftmaxAggregation(learn=True)), LISTS
    ),
    "SAGEConv power mean": Case(
        lambda: pyg.SAGEConv(W, W, aggr=pyg.PowerMeanAggregation(learn=True)), LISTS
    ),
    "SAGEConv median": Case(lambda: pyg.SAGEConv(W, W, aggr="median"), LISTS),
    "SAGEConv several": Case(lambda: pyg.SAGEConv(W, W, aggr=["mean", "max", "var"]), LISTS),
    "SAGEConv lstm": Case(lambda: pyg.SAGEConv(W, W, aggr="lstm"), ("EdgeIndex",)),
    "SAGEConv bipartite": Case(lambda: pyg.SAGEConv((W, W), W), LISTS, bipartite=True),
    "GraphConv": Case(lambda: pyg.GraphConv(W, W), ALL),
    "GraphConv weighted": Case(lambda: pyg.GraphConv(W, W, aggr="mean"), TENSOR, (WEIGHT,)),
    "GraphConv bipartite": Case(lambda: pyg.GraphConv((W, W), W), LISTS, bipartite=True),
    "GatedGraphConv": Case(lambda: pyg.GatedGraphConv(W, 2), ALL),
    "ResGatedGraphConv": Case(lambda: pyg.ResGatedGraphConv(W, W), ALL),
    "ResGatedGraphConv edges": Case(
        lambda: pyg.ResGatedGraphConv(W, W, edge_dim=EDGE_WIDTH), TENSOR, (ATTR,)
    ),
    "GATConv": Case(lambda: pyg.GATConv(W, W // 2, heads=2, dropout=0.2), ALL),
    "GATConv edges": Case(
        lambda: pyg.GATConv(W, W // 2, heads=2, edge_dim=EDGE_WIDTH), TENSOR, (ATTR,)
    ),
    "GATConv bipartite": Case(
        lambda: pyg.GATConv((W, W), W, add_self_loops=False), LISTS, bipartite=True
    ),
    "GATConv residual": Case(lambda: pyg.GATConv(W, W, residual=True), LISTS),
    "GATv2Conv": Case(lambda: pyg.GATv2Conv(W, W // 2, heads=2, dropout=0.2), LISTS),
    "GATv2Conv edges": Case(
        lambda: pyg.GATv2Conv(W, W, edge_dim=EDGE_WIDTH, share_weights=True), TENSOR, (ATTR,)
    ),
    "GATv2Conv bipartite": Case(
        lambda: pyg.GATv2Conv((W, W), W, add_self_loops=False), LISTS, bipartite=True
    ),
    "TransformerConv": Case(lambda: pyg.TransformerConv(W, W // 2, heads=2, dropout=0.2), ALL),
    "TransformerConv edges": Case(
        lambda: pyg.TransformerConv(W, W, edge_dim=EDGE_WIDTH, beta=True), TENSOR, (ATTR,)
    ),
    "TransformerConv bipartite": Case(
        lambda: pyg.TransformerConv((W, W), W), LISTS, bipartite=True
    ),
    "AGNNConv": Case(lambda: pyg.AGNNConv(), ALL),
    "TAGConv": Case(lambda: pyg.TAGConv(W, W), ALL),
    "GINConv": Case(lambda: pyg.GINConv(_mlp(W, W), train_eps=True), ALL),
    "GINEConv": Case(lambda: pyg.GINEConv(_mlp(W, W), edge_dim=EDGE_WIDTH), TENSOR, (ATTR,)),
    "ARMAConv": Case(lambda: pyg.ARMAConv(W, W, num_stacks=2, num_layers=2), NOT_CSR),
    "SGConv": Case(lambda: pyg.SGConv(W, W, K=2), ALL),
    "SGConv cached": Case(lambda: pyg.SGConv(W, W, K=2, cached=True), ALL),
    "SSGConv": Case(lambda: pyg.SSGConv(W, W, alpha=0.1, K=2), ALL),
    "APPNP": Case(lambda: pyg.APPNP(K=3, alpha=0.1, dropout=0.2), ALL),
    "MFConv": Case(lambda: pyg.MFConv(W, W, max_degree=4), NOT_CSR),
    "RGCNConv": Case(lambda: pyg.RGCNConv(W, W, RELATIONS), TENSOR, (TYPE,)),
    "RGCNConv bases": Case(lambda: pyg.RGCNConv(W, W, RELATIONS, num_bases=2), TENSOR, (TYPE,)),
    "RGCNConv blocks": Case(lambda: pyg.RGCNConv(W, W, RELATIONS, num_blocks=4), TENSOR, (TYPE,)),
    "FastRGCNConv": Case(lambda: pyg.FastRGCNConv(W, W, RELATIONS), TENSOR, (TYPE,)),
    "RGATConv": Case(lambda: pyg.RGATConv(W, W, RELATIONS), TENSOR, (TYPE,)),
    "SignedConv": Case(
        lambda: pyg.SignedConv(W, W // 2, first_aggr=True), TENSOR, (EDGES.flip(0),)
    ),
    "GMMConv": Case(lambda: pyg.GMMConv(W, W, dim=EDGE_WIDTH, kernel_size=3), TENSOR, (ATTR,)),
    "NNConv": Case(lambda: pyg.NNConv(W, 8, _mlp(EDGE_WIDTH, W * 8)), TENSOR, (ATTR,)),
    "CGConv": Case(lambda: pyg.CGConv(W, dim=EDGE_WIDTH, batch_norm=True), TENSOR, (ATTR,)),
    "EdgeConv": Case(lambda: pyg.EdgeConv(_mlp(2 * W, W)), ALL),
    "PointNetConv": Case(
        lambda: pyg.PointNetConv(_mlp(W + 3, W), _mlp(W, W)), LISTS, before=(POSITION,)
    ),
    "PPFConv": Case(
        lambda: pyg.PPFConv(_mlp(W + 4, W), _mlp(W, W)), LISTS, before=(POSITION, NORMAL)
    ),
    "PointTransformerConv": Case(lambda: pyg.PointTransformerConv(W, W), LISTS, before=(POSITION,)),
    "FeaStConv": Case(lambda: pyg.FeaStConv(W, W, heads=2), LISTS),
    "HypergraphConv": Case(lambda: pyg.HypergraphConv(W, W), TENSOR),
    "LEConv": Case(lambda: pyg.LEConv(W, W), ALL),
    "PNAConv": Case(
        lambda: pyg.PNAConv(
            W,
            W,
            aggregators=["mean", "min", "max", "std"],
            scalers=["identity", "amplification", "attenuation"],
            deg=DEGREES,
        ),
        LISTS,
    ),
    "ClusterGCNConv": Case(lambda: pyg.ClusterGCNConv(W, W), LISTS),
    "GENConv": Case(lambda: pyg.GENConv(W, W, learn_t=True, norm="layer"), ALL),
    "GENConv edges": Case(
        lambda: pyg.GENConv(W, W, aggr="powermean", learn_p=True, edge_dim=EDGE_WIDTH),
        TENSOR,
        (ATTR,),
    ),
    "GCN2Conv": Case(lambda: pyg.GCN2Conv(W, alpha=0.1, theta=0.5, layer=1), ALL, before=(X0,)),
    "PANConv": Case(lambda: _First(pyg.PANConv(W, W, filter_size=2)), ("sparse",)),
    "FiLMConv": Case(lambda: pyg.FiLMConv(W, W), ALL),
    "SuperGATConv": Case(
        lambda: pyg.SuperGATConv(W, W // 2, heads=2, is_undirected=True, dropout=0.2), TENSOR
    ),
    "FAConv": Case(lambda: pyg.FAConv(W, dropout=0.2), (*LISTS, "csr"), before=(X0,)),
    "EGConv": Case(lambda: pyg.EGConv(W, W, aggregators=["mean", "max", "symnorm"]), ALL),
    "PDNConv": Case(
        lambda: pyg.PDNConv(W, W, edge_dim=EDGE_WIDTH, hidden_channels=8), TENSOR, (ATTR,)
    ),
    "GeneralConv": Case(
        lambda: pyg.GeneralConv(W, W, in_edge_channels=EDGE_WIDTH, attention=True, heads=2),
        TENSOR,
        (ATTR,),
    ),
    "HEATConv": Case(
        lambda: pyg.HEATConv(W, W, 2, RELATIONS, 8, EDGE_WIDTH, 8), TENSOR, (NODE_TYPE, TYPE, ATTR)
    ),
    "LGConv": Case(lambda: pyg.LGConv(), ALL),
    "SimpleConv": Case(lambda: pyg.SimpleConv(aggr="mean", combine_root="self_loop"), LISTS),
    "PointGNNConv": Case(
        lambda: pyg.PointGNNConv(_mlp(W, 3), _mlp(W + 3, W), _mlp(W, W)),
        LISTS,
        before=(POSITION,),
    ),
    "AntiSymmetricConv": Case(lambda: pyg.AntiSymmetricConv(W, num_iters=2), LISTS),
    "DirGNNConv": Case(lambda: pyg.DirGNNConv(pyg.SAGEConv(W, W)), TENSOR),
    "MixHopConv": Case(lambda: pyg.MixHopConv(W, W // 2, powers=[0, 1, 2]), ALL),
    "GPSConv": Case(
        lambda: pyg.GPSConv(W, pyg.GINConv(_mlp(W, W)), heads=2, dropout=0.2),
        LISTS,
        named=(("batch", BATCH),),
    ),
    "GPSConv performer": Case(
        lambda: pyg.GPSConv(W, pyg.GATConv(W, W), heads=2, attn_type="performer"),
        LISTS,
        named=(("batch", BATCH),),
    ),
    "DNAConv": Case(lambda: _Dna(), TENSOR),
    "MeshCNNConv": Case(lambda: _Mesh(), TENSOR),
    "HGTConv": Case(lambda: _Hetero("hgt"), TENSOR),
    "HANConv": Case(lambda: _Hetero("han"), TENSOR),
    "HeteroConv": Case(lambda: _Hetero("several"), TENSOR),
}
if not hasattr(pyg, "MeshCNNConv"):  # PyG 2.6
    del CONVS["MeshCNNConv"]
if "clamp_min" not in inspect.signature(pyg.PowerMeanAggregation).parameters:  # PyG 2.6 and 2.7
    del CONVS["SAGEConv power mean"]  # its gradient at zero is not finite

LEFT_OUT = {
    "MessagePassing": "the base class",
    "CuGraphSAGEConv": "needs pylibcugraphops and a GPU",
    "CuGraphGATConv": "needs pylibcugraphops and a GPU",
    "CuGraphRGCNConv": "needs pylibcugraphops and a GPU",
    "FusedGATConv": "needs dgNN and a GPU",
    "SplineConv": "needs torch-spline-conv or pyg-lib",
    "DynamicEdgeConv": "needs torch-cluster or pyg-lib for its neighbors",
    "XConv": "needs torch-cluster or pyg-lib for its neighbors",
    "GravNetConv": "needs torch-cluster or pyg-lib for its neighbors",
    "WLConv": "has neither parameters nor a gradient",
    "WLConvContinuous": "averages with no parameter of its own, as SimpleConv does",
}


class _First(nn.Module):
    """A conv that gives more than features."""

    def __init__(self, conv: nn.Module) -> None:
        super().__init__()
        self.conv = conv

    def forward(self, x: Tensor, adjacency: Any) -> Tensor:
        return self.conv(x, adjacency)[0]


class _Dna(nn.Module):
    """Dynamic neighborhood aggregation reads the outputs of all layers before it."""

    def __init__(self) -> None:
        super().__init__()
        self.convs = nn.ModuleList(pyg.DNAConv(W, heads=2, groups=2, dropout=0.2) for _ in "ab")

    def forward(self, x: Tensor, adjacency: Any) -> Tensor:
        history = x.view(-1, 1, W)
        for conv in self.convs:
            history = torch.cat([history, conv(history, adjacency).view(-1, 1, W)], dim=1)
        return history[:, -1]


class _Mesh(nn.Module):
    """Each edge of a mesh, here a node, has four neighbors in order."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = pyg.MeshCNNConv(W, W)

    def forward(self, x: Tensor, adjacency: Any) -> Tensor:
        neighbors = torch.randint(NODES, (NODES * 4,), generator=seeded(9))
        return self.conv(x, torch.stack([torch.arange(NODES).repeat_interleave(4), neighbors]))


class _Hetero(nn.Module):
    """Papers and authors: the first 200 nodes, and the others."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        kinds = [("paper", "cites", "paper"), ("author", "writes", "paper")]
        meta = (["paper", "author"], [*kinds, ("paper", "names", "author")])
        if kind == "hgt":
            self.conv = pyg.HGTConv(W, W, meta, heads=2)
        elif kind == "han":
            self.conv = pyg.HANConv(W, W, meta, heads=2, dropout=0.2)
        else:
            self.conv = pyg.HeteroConv(
                {
                    kinds[0]: pyg.GATConv(W, W),
                    kinds[1]: pyg.SAGEConv((W, W), W, aggr="max"),
                    meta[1][2]: pyg.SAGEConv((W, W), W),
                }
            )

    def forward(self, x: Tensor, adjacency: Tensor) -> Tensor:
        nodes = {"paper": x[:200], "author": x[200:]}
        source, target = adjacency
        among = (source < 200) & (target < 200)
        across = (source >= 200) & (target < 200)
        edges = {
            ("paper", "cites", "paper"): adjacency[:, among],
            ("author", "writes", "paper"): adjacency[:, across] - torch.tensor([[200], [0]]),
            ("paper", "names", "author"): adjacency[:, across].flip(0) - torch.tensor([[0], [200]]),
        }
        return self.conv(nodes, edges)["paper"]


AROUND: dict[str, Callable[[], Sequence[nn.Module]]] = {
    "relu": lambda: (pyg.BatchNorm(W), nn.ReLU()),
    "elu": lambda: (pyg.LayerNorm(W), nn.ELU()),
    "prelu": lambda: (pyg.GraphNorm(W), nn.PReLU()),
    "leaky_relu": lambda: (pyg.PairNorm(), nn.LeakyReLU()),
}


class Net(nn.Module):
    """linear, norm, activation, dropout, the conv, and the same once more behind it."""

    def __init__(self, case: Case, around: str) -> None:
        super().__init__()
        self.case = case
        self.first = nn.Linear(W, W)
        self.norm, self.activation = AROUND[around]()
        self.dropout = nn.Dropout(0.3)
        self.conv = case.make()
        self.last_activation = AROUND[around]()[1]
        self.last = nn.LazyLinear(4)
        with torch.no_grad():
            self(X, EDGES if "tensor" in case.formats else FORMATS[case.formats[0]]())

    def forward(self, x: Tensor, adjacency: Any) -> Tensor:
        x = self.dropout(self.activation(self.norm(self.first(x))))
        features: Any = (x, x.flip(0)) if self.case.bipartite else x
        case = self.case
        h = self.conv(features, *case.before, adjacency, *case.extra, **dict(case.named))
        h = h[0] if isinstance(h, tuple) else h
        return self.last(self.dropout(self.last_activation(h)))
