"""PyG's own models and the parts of its examples, stock beside every level."""

from __future__ import annotations

import pytest
from beside import check, error_of, ways
from stacks import PREAMBLE

W = 16
PAIRS = "[('a', 'to', 'b'), ('b', 'to', 'a'), ('a', 'to', 'a')]"
META = f"(['a', 'b'], {PAIRS})"
TYPED = "dict(a=x[:15], b=x[15:])"
EDGES_TYPED = f"dict.fromkeys({PAIRS}, e % 15)"
MLP = f"nn.Sequential(nn.Linear({W}, 8), nn.ReLU(), nn.Linear(8, {W}))"

# How a model is made, and how it is called with the features x, the edges e, three attributes a and
# a type t of each edge, positions pos, and the graph of each node, batch.
MODELS: dict[str, tuple[str, str]] = {
    "GCN": (f"pyg.GCN({W}, 8, 3, 4, norm='BatchNorm', jk='cat')", "net(x, e)"),
    "GraphSAGE": (
        f"pyg.GraphSAGE({W}, 8, 3, 4, aggr='max', norm='LayerNorm', jk='max')",
        "net(x, e)",
    ),
    "GIN": (f"pyg.GIN({W}, 8, 2, 4, norm='GraphNorm')", "net(x, e, batch=batch)"),
    "GAT": (f"pyg.GAT({W}, 8, 2, 4, v2=True, heads=2, edge_dim=3)", "net(x, e, edge_attr=a)"),
    "PNA": (
        f"pyg.PNA({W}, 8, 2, 4, aggregators=['mean', 'std', 'max'], scalers=['identity', 'linear'],"
        " deg=torch.tensor([1, 4, 5]), edge_dim=3)",
        "net(x, e, edge_attr=a)",
    ),
    "EdgeCNN": (f"pyg.EdgeCNN({W}, 8, 2, 4)", "net(x, e)"),
    "GraphUNet": (f"pyg.GraphUNet({W}, 8, 4, depth=2, pool_ratios=0.5)", "net(x, e, batch)"),
    "DeeperGCN": (
        f"pyg.DeepGCNLayer(pyg.GENConv({W}, {W}, learn_t=True, num_layers=2), nn.LayerNorm({W}),"
        " nn.ReLU(), block='res+')",
        "net(net(x, e), e)",
    ),
    "DeeperGCN checkpointed": (
        f"pyg.DeepGCNLayer(pyg.GENConv({W}, {W}), nn.LayerNorm({W}), nn.ReLU(), block='res+',"
        " ckpt_grad=True)",
        "net(x, e)",
    ),
    "AttentiveFP": (
        f"pyg.AttentiveFP({W}, 8, 4, 3, num_layers=2, num_timesteps=2)",
        "net(x, e, a, batch)",
    ),
    "jumping LSTM": (f"pyg.GCN({W}, 8, 3, 4, jk='lstm')", "net(x, e)"),
    "SchNet's filters": (
        f"pyg.models.schnet.CFConv({W}, {W}, 8, {MLP}.append(nn.Linear({W}, 8)), 10.0)",
        f"net(x, e, (pos[e[0]] - pos[e[1]]).norm(dim=1), a.repeat(1, 6)[:, :{W}])",
    ),
    "HGT": (f"pyg.HGTConv({W}, 8, {META}, heads=2)", f"net({TYPED}, {EDGES_TYPED})"),
    "HAN": (f"pyg.HANConv({W}, 8, {META}, heads=2)", f"net({TYPED}, {EDGES_TYPED})"),
    "HeteroConv": (
        f"pyg.HeteroConv({{k: pyg.SAGEConv((-1, -1), 8, aggr='max') for k in {PAIRS}}})",
        f"net({TYPED}, {EDGES_TYPED})",
    ),
    "to_hetero": (
        f"pyg.to_hetero(pyg.GraphSAGE((-1, -1), 8, 2, 4), {META})",
        f"net({TYPED}, {EDGES_TYPED})",
    ),
    "to_hetero attention": (
        f"pyg.to_hetero(pyg.GAT((-1, -1), 8, 2, 4, add_self_loops=False), {META})",
        f"net({TYPED}, {EDGES_TYPED})",
    ),
    "RGCN": (f"pyg.RGCNConv({W}, 8, 3, num_bases=2)", "net(x, e, t)"),
    "GPS": (
        f"pyg.GPSConv({W}, pyg.GINEConv({MLP}, edge_dim=3), heads=2)",
        "net(x, e, batch, edge_attr=a)",
    ),
    "recurrent": (
        f"nn.ModuleDict(dict(conv=pyg.GatedGraphConv({W}, 3), cell=nn.GRUCell({W}, {W})))",
        "net['cell'](net['conv'](net['cell'](net['conv'](x, e), x), e), x)",
    ),
    "PointNet++": (
        f"pyg.PointNetConv(nn.Sequential(nn.Linear({W} + 3, 8), nn.ReLU(), nn.Linear(8, {W})))",
        "pyg.global_max_pool(net(x, pos, e), batch)",
    ),
    "PointTransformer": (f"pyg.PointTransformerConv({W}, 8)", "net(x, pos, e)"),
    "TopK": (f"pyg.TopKPooling({W}, ratio=0.5)", "net(x, e, None, batch)[0]"),
    "SAGPooling": (f"pyg.SAGPooling({W}, ratio=0.5, GNN=pyg.GATConv)", "net(x, e, None, batch)[0]"),
    "ASAPooling": (f"pyg.ASAPooling({W}, ratio=0.5)", "net(x, e, None, batch)[0]"),
    "EdgePooling": (f"pyg.EdgePooling({W})", "net(x, e, batch)[0]"),
    "MemPooling": (f"pyg.MemPooling({W}, 8, 2, 3)", "net(x, batch)[0]"),
    "DMoN": (
        f"pyg.DMoNPooling({W}, 4)",
        "(lambda d: (d[1], sum(d[3:])))(net(x[None], pyg_dense(e, 30)))",
    ),
    "Set2Set": (f"pyg.Set2Set({W}, 3)", "net(x, batch)"),
    "GMT": (f"pyg.GraphMultisetTransformer({W}, 3, heads=2)", "net(x, batch)"),
    "LINKX": (f"pyg.LINKX(30, {W}, 8, 4, 2)", "net(x, e)"),
    "SignedGCN": (f"pyg.SignedGCN({W}, 8, 2)", "net(x, e, e.flip(0))"),
    "VGAE": (f"pyg.GAE(pyg.GCN({W}, 8, 2))", "net.decode(net.encode(x, e), e)"),
    "node2vec's loss": (f"pyg.LightGCN(30, {W}, 2)", "net(e, e)"),
    "CorrectAndSmooth MLP": (f"pyg.MLP([{W}, 8, 4], norm='batch_norm', act='gelu')", "net(x)"),
}

PROGRAM = '''

from torch_geometric.utils import to_dense_adj


def pyg_dense(e, n):
    return to_dense_adj(e, max_num_nodes=n)


def leaves(value):
    """The outputs of a model that have a gradient."""
    if isinstance(value, torch.Tensor):
        return (value,) if value.requires_grad else ()
    value = value.values() if isinstance(value, dict) else value
    return tuple(leaf for one in value if one is not None for leaf in leaves(one))


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = {make}
        self.first = nn.Linear(16, 16)

    def forward(self, x, e, a, t, pos, batch):
        x, net = self.first(x), self.net
        return leaves({call})


def build():
    return Net()


def train(model, record):
    for step, scale in enumerate((1.0, -5.0, 0.1)):
        x = (normal(step, 30, 16) * scale).requires_grad_()
        e = edges(step, 90 + 20 * step, (0, 30), (0 if step else 15, 30))
        a, t, pos = normal(step + 7, e.size(1), 3), kinds(step, e.size(1), 3), normal(step, 30, 3)
        batch = kinds(step, 30, 3).sort().values
        model.train()
        out = model(x, e, a, t, pos, batch)
        finish(model, record, ("once", "twice", "once")[step], out, x=x)
'''


@pytest.mark.long
@pytest.mark.parametrize("name", MODELS)
def test_model(name: str) -> None:
    make, call = MODELS[name]
    source = PREAMBLE.replace("{dtype}", "float64") + PROGRAM
    source = source.replace("{make}", make).replace("{call}", call)
    assert error_of(source) is None
    check(source, ways(16))
