"""Small models of many kinds, with small data sets, for the error of gradients.

The models follow PyG's examples (graph transformers, pooling, relational and heterogeneous graphs)
and the two other fields of the GACT paper (texts, images). Data are random with labels that can be
learned, or scikit-learn's digits.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch_geometric.nn import (
    BatchNorm,
    DenseSAGEConv,
    FastRGCNConv,
    GCN2Conv,
    GINEConv,
    GPSConv,
    HGTConv,
    PNAConv,
    dense_diff_pool,
    dense_mincut_pool,
    global_add_pool,
)

CLASSES = 6

_AGGREGATORS = ["mean", "min", "max", "std"]


@dataclass(frozen=True)
class Small:
    """A model and one batch.

    Attributes:
        model: Returns logits [n, C], or logits and a further loss.
        inputs: Arguments of its forward.
        y: Classes [n].
        lr: The learning rate of Adam.
    """

    model: nn.Module
    inputs: tuple[Any, ...]
    y: Tensor
    lr: float = 1e-3

    def loss(self, model: nn.Module) -> Tensor:
        """Return the loss of a forward of ``model``, a scalar."""
        output = model(*self.inputs)
        logits, further = output if isinstance(output, tuple) else (output, 0.0)
        return F.cross_entropy(logits, self.y) + further


def _mlp(i: int, hidden: int, o: int) -> nn.Module:
    return nn.Sequential(nn.Linear(i, hidden), nn.ReLU(), nn.Linear(hidden, o))


class DeepGCNII(nn.Module):
    """GCNII with 64 layers, as in its paper."""

    def __init__(self, features: int, hidden: int = 64, layers: int = 64) -> None:
        super().__init__()
        self.lin_in, self.lin_out = nn.Linear(features, hidden), nn.Linear(hidden, CLASSES)
        self.convs = nn.ModuleList(GCN2Conv(hidden, 0.1, 0.5, i + 1) for i in range(layers))

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        x = F.dropout(x, 0.5, self.training)
        x = first = self.lin_in(x).relu()
        for conv in self.convs:
            x = conv(F.dropout(x, 0.5, self.training), first, edge_index).relu()
        return self.lin_out(F.dropout(x, 0.5, self.training))


class GraphGPS(nn.Module):
    """Local message passing with edge features beside attention over each graph."""

    def __init__(self, hidden: int = 64, layers: int = 5) -> None:
        super().__init__()
        self.node, self.edge = nn.Embedding(28, hidden), nn.Embedding(4, hidden)
        attention = {"heads": 4, "attn_kwargs": {"dropout": 0.5}}
        self.convs = nn.ModuleList(
            GPSConv(hidden, GINEConv(_mlp(hidden, hidden, hidden)), **attention)
            for _ in range(layers)
        )
        self.head = _mlp(hidden, hidden // 2, CLASSES)

    def forward(self, x: Tensor, edge_index: Tensor, edge_attr: Tensor, batch: Tensor) -> Tensor:
        x, edge_attr = self.node(x), self.edge(edge_attr)
        for conv in self.convs:
            x = conv(x, edge_index, batch, edge_attr=edge_attr)
        return self.head(global_add_pool(x, batch))


class PNA(nn.Module):
    """Mean, minimum, maximum and deviation of neighbors, scaled by degree."""

    def __init__(self, degrees: Tensor, hidden: int = 64, layers: int = 4) -> None:
        super().__init__()
        self.node, self.edge = nn.Embedding(28, hidden), nn.Embedding(4, 16)
        aggregators, scalers = _AGGREGATORS, ["identity", "amplification", "attenuation"]
        self.convs = nn.ModuleList(
            PNAConv(hidden, hidden, aggregators, scalers, degrees, edge_dim=16, towers=4)
            for _ in range(layers)
        )
        self.norms = nn.ModuleList(BatchNorm(hidden) for _ in range(layers))
        self.head = nn.Linear(hidden, CLASSES)

    def forward(self, x: Tensor, edge_index: Tensor, edge_attr: Tensor, batch: Tensor) -> Tensor:
        x, edge_attr = self.node(x), self.edge(edge_attr)
        for conv, norm in zip(self.convs, self.norms, strict=True):
            x = norm(conv(x, edge_index, edge_attr)).relu()
        return self.head(global_add_pool(x, batch))


class _Dense(nn.Module):
    def __init__(self, i: int, hidden: int, o: int) -> None:
        super().__init__()
        self.convs = nn.ModuleList(
            DenseSAGEConv(a, b) for a, b in ((i, hidden), (hidden, hidden), (hidden, o))
        )
        self.norms = nn.ModuleList(nn.BatchNorm1d(n) for n in (hidden, hidden, o))

    def forward(self, x: Tensor, adj: Tensor) -> Tensor:
        for conv, norm in zip(self.convs, self.norms, strict=True):
            x = conv(x, adj)
            x = norm(x.flatten(0, 1)).relu().view_as(x)
        return x


class Pooled(nn.Module):
    """Dense graphs, pooled twice by learned clusters."""

    def __init__(self, features: int, pool: Callable[..., Any], hidden: int = 64) -> None:
        super().__init__()
        self.pool = pool
        widths, clusters = (features, hidden, hidden), (24, 6)
        self.assign = nn.ModuleList(
            _Dense(i, hidden, c) for i, c in zip(widths[:2], clusters, strict=True)
        )
        self.embed = nn.ModuleList(_Dense(i, hidden, hidden) for i in widths)
        self.head = _mlp(hidden, hidden, CLASSES)

    def forward(self, x: Tensor, adj: Tensor) -> tuple[Tensor, Tensor]:
        further = x.new_zeros(())
        for assign, embed in zip(self.assign, self.embed, strict=False):
            x, adj, link, entropy = self.pool(embed(x, adj), adj, assign(x, adj))
            further = further + link + entropy
        return self.head(self.embed[-1](x, adj).mean(1)), further


class RGCN(nn.Module):
    """Relations with bases, on embeddings of nodes."""

    def __init__(self, nodes: int, relations: int, hidden: int = 64) -> None:
        super().__init__()
        self.embedding = nn.Embedding(nodes, hidden)
        self.first = FastRGCNConv(hidden, hidden, relations, num_bases=8)
        self.second = FastRGCNConv(hidden, CLASSES, relations, num_bases=8)

    def forward(self, nodes: Tensor, edge_index: Tensor, edge_type: Tensor) -> Tensor:
        x = self.first(self.embedding(nodes), edge_index, edge_type).relu()
        return self.second(x, edge_index, edge_type)


class HGT(nn.Module):
    """Attention over a graph with several kinds of nodes and edges."""

    def __init__(self, features: int, metadata: Any, hidden: int = 64, layers: int = 2) -> None:
        super().__init__()
        self.lin = nn.ModuleDict({kind: nn.Linear(features, hidden) for kind in metadata[0]})
        self.convs = nn.ModuleList(HGTConv(hidden, hidden, metadata, 2) for _ in range(layers))
        self.head = nn.Linear(hidden, CLASSES)

    def forward(self, x: dict[str, Tensor], edge_index: dict[Any, Tensor]) -> Tensor:
        x = {kind: self.lin[kind](value).relu() for kind, value in x.items()}
        for conv in self.convs:
            x = conv(x, edge_index)
        return self.head(x["author"])


class Bert(nn.Module):
    """Embeddings of words and places, a transformer encoder, and logits of the mean over places.

    Shapes:
        - **input**: words [B, L] int64
        - **output**: logits [B, C] float32
    """

    def __init__(self, words: int, classes: int, length: int, hidden: int = 128) -> None:
        super().__init__()
        self.word, self.place = nn.Embedding(words, hidden), nn.Embedding(length, hidden)
        self.norm = nn.LayerNorm(hidden)
        layer = nn.TransformerEncoderLayer(hidden, 4, 4 * hidden, 0.1, "gelu", batch_first=True)
        self.layers = nn.TransformerEncoder(layer, 3, enable_nested_tensor=False)
        self.head = nn.Linear(hidden, classes)

    def forward(self, words: Tensor) -> Tensor:
        places = torch.arange(words.size(1), device=words.device)
        x = self.layers(self.norm(self.word(words) + self.place(places)))
        return self.head(self.pooled(x))

    def pooled(self, x: Tensor) -> Tensor:
        """Return one row of each text [B, L, W]."""
        return x.mean(1)


class Encoder(Bert):
    """The same network with logits of the first place, as in BERT."""

    def pooled(self, x: Tensor) -> Tensor:
        return x[:, 0].tanh()


class VisionTransformer(nn.Module):
    """Patches of an image as words of a transformer encoder, whose first place gives the logits.

    The norms come before attention and before the MLP, as in ViT (Dosovitskiy et al., ICLR 2021,
    section 3.1).

    Shapes:
        - **input**: images [B, 1, S, S] float32
        - **output**: logits [B, C] float32
    """

    def __init__(self, side: int, classes: int, patch: int = 2, hidden: int = 128) -> None:
        super().__init__()
        self.patches = nn.Conv2d(1, hidden, patch, patch)
        self.first = nn.Parameter(torch.zeros(1, 1, hidden))
        self.place = nn.Parameter(0.02 * torch.randn(1, (side // patch) ** 2 + 1, hidden))
        layer = nn.TransformerEncoderLayer(
            *(hidden, 4, 4 * hidden, 0.1, "gelu"), batch_first=True, norm_first=True
        )
        norm = nn.LayerNorm(hidden)
        self.layers = nn.TransformerEncoder(layer, 3, norm, enable_nested_tensor=False)
        self.head = nn.Linear(hidden, classes)

    def forward(self, images: Tensor) -> Tensor:
        x = self.patches(images).flatten(2).transpose(1, 2)
        x = torch.cat([self.first.expand(len(x), -1, -1), x], 1) + self.place
        return self.head(self.layers(x)[:, 0])


def _conv(i: int, o: int, size: int, stride: int) -> nn.Sequential:
    conv = nn.Conv2d(i, o, size, stride, size // 2, bias=False)
    return nn.Sequential(conv, nn.BatchNorm2d(o))


class _Residual(nn.Module):
    def __init__(self, i: int, o: int, stride: int) -> None:
        super().__init__()
        self.body = nn.Sequential(*_conv(i, o, 3, stride), nn.ReLU(), *_conv(o, o, 3, 1))
        self.skip = _conv(i, o, 1, stride)

    def forward(self, x: Tensor) -> Tensor:
        return (self.body(x) + self.skip(x)).relu()


def residual_network() -> nn.Module:
    """Return a residual network of six blocks over images of one channel and ten classes."""
    widths = ((1, 32, 1), (32, 32, 1), (32, 64, 2), (64, 64, 1), (64, 128, 2), (128, 128, 1))
    blocks = [_Residual(*block) for block in widths]
    return nn.Sequential(*blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(128, 10))


def digits() -> tuple[Tensor, Tensor]:
    """Return scikit-learn's images [n, 1, 8, 8] float32 in [0, 1], and their classes [n]."""
    from sklearn.datasets import load_digits

    data = load_digits()
    x = torch.as_tensor(data.images, dtype=torch.float32).unsqueeze(1) / 16
    return x, torch.as_tensor(data.target)


def make_small(name: str) -> Small:
    """Return one of :data:`SMALL` with its data, the same at every call."""
    torch.manual_seed(0)
    return SMALL[name]()


def _communities(nodes: int, edges: int, features: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return features that hint at the class, edges mostly inside of classes, and classes."""
    y = torch.randint(CLASSES, (nodes,))
    order, counts = y.argsort(), y.bincount(minlength=CLASSES)
    starts = counts.cumsum(0) - counts
    source = torch.randint(nodes, (edges,))
    inside = order[starts[y[source]] + (torch.rand(edges) * counts[y[source]]).long()]
    target = torch.where(torch.rand(edges) < 0.7, inside, torch.randint(nodes, (edges,)))
    x = torch.randn(nodes, features) + 0.5 * torch.randn(CLASSES, features)[y]
    return x, torch.stack([source, target]), y


def _molecules() -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Return 48 rings with chords; the class of a ring is its most frequent atom."""
    graphs, size = 48, 23
    y = torch.randint(CLASSES, (graphs,))
    x = torch.where(
        torch.rand(graphs, size) < 0.4,
        y[:, None].expand(-1, size),
        torch.randint(28, (graphs, size)),
    ).flatten()
    ring = torch.arange(graphs * size)
    following = ring - ring % size + (ring + 1) % size
    chord = ring - ring % size + torch.randint(size, (graphs * size,))
    source, target = torch.cat([ring, ring[::3]]), torch.cat([following, chord[::3]])
    edge_index = torch.stack([torch.cat([source, target]), torch.cat([target, source])])
    edge_attr = torch.randint(4, (edge_index.size(1),))
    return x, edge_index, edge_attr, ring // size, y


def _gcnii() -> Small:
    x, edge_index, y = _communities(1000, 5_000, 64)
    return Small(DeepGCNII(64), (x, edge_index), y, lr=0.01)


def _gps() -> Small:
    *inputs, y = _molecules()
    return Small(GraphGPS(), tuple(inputs), y)


def _pna() -> Small:
    *inputs, y = _molecules()
    degrees = inputs[1][1].bincount().bincount()
    return Small(PNA(degrees), tuple(inputs), y)


def _pooled(pool: Callable[..., Any]) -> Small:
    graphs, size = 32, 60
    y = torch.randint(CLASSES, (graphs,))
    # The more edges, the higher the class.
    adj = (torch.rand(graphs, size, size) < 0.03 * (1 + y[:, None, None])).float()
    adj = ((adj + adj.mT) > 0).float()
    return Small(Pooled(16, pool), (torch.randn(graphs, size, 16), adj), y)


def _rgcn() -> Small:
    _, edge_index, y = _communities(4000, 20_000, 1)
    edge_type = torch.randint(12, (edge_index.size(1),))
    return Small(RGCN(4000, 12), (torch.arange(4000), edge_index, edge_type), y, lr=0.01)


def _hgt() -> Small:
    x, edge_index, y = _communities(1500, 9000, 32)
    papers = torch.randn(3000, 32)
    writes = torch.stack([torch.randint(1500, (8000,)), torch.randint(3000, (8000,))])
    kinds = {
        ("author", "knows", "author"): edge_index,
        ("author", "writes", "paper"): writes,
        ("paper", "written_by", "author"): writes.flip(0),
    }
    model = HGT(32, (["author", "paper"], [*kinds]))
    return Small(model, ({"author": x, "paper": papers}, kinds), y)


def _bert() -> Small:
    y = torch.randint(CLASSES, (32,))
    words = torch.randint(500, (32, 64))
    words = torch.where(torch.rand(32, 64) < 0.15, y[:, None].expand(-1, 64), words)
    return Small(Encoder(500, CLASSES, 64), (words,), y, lr=3e-4)


def _images() -> Small:
    x, y = digits()
    return Small(residual_network(), (x[:256],), y[:256])


SMALL: dict[str, Callable[[], Small]] = {
    "gcnii-64": _gcnii,
    "graphgps": _gps,
    "pna": _pna,
    "diffpool": lambda: _pooled(dense_diff_pool),
    "mincutpool": lambda: _pooled(dense_mincut_pool),
    "rgcn": _rgcn,
    "hgt": _hgt,
    "bert-3": _bert,
    "resnet": _images,
}
