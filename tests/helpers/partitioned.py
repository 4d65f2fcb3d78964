"""The start of a script that :func:`ranks.run_ranks` runs: one graph, cut into parts."""

PARTS = '''
import torch_geometric.nn as pyg
from torch_geometric.data import Data
from gact_graph.distributed import partition, sum_gradients
from gact_graph.layers.halo.exchange import Exchange

torch.manual_seed(0)
N, W = 200, 16
edges = torch.randint(N, (2, 1500)).unique(dim=1)
edges = torch.cat([edges, torch.arange(5).expand(2, 5)], dim=1).unique(dim=1)  # some self-loops
data = Data(x=torch.randn(N, W), y=torch.arange(N) % 4, edge_index=edges)
data.weight = torch.rand(edges.size(1)) + 0.1
data.attr = torch.rand(edges.size(1), 3)
part = partition(data, world)[rank]

def mlp(inputs):
    return nn.Sequential(nn.Linear(inputs, W), nn.ReLU(), nn.Linear(W, W))

class Net(nn.Module):
    def __init__(self, make, extra=None):
        super().__init__()
        self.convs, self.last, self.extra = nn.ModuleList([make(), make()]), nn.Linear(W, 4), extra
    def forward(self, graph):
        x, extra = graph.x, () if self.extra is None else (graph[self.extra],)
        for conv in self.convs:
            x = conv(x, graph.edge_index, *extra).relu()
        return self.last(x)

def step(model, graph):
    model.zero_grad()
    out = model(graph)
    (F.cross_entropy(out, graph.y, reduction="sum") / N).backward()
    return out.detach()

def built(make, extra=None, **options):
    torch.manual_seed(1)
    model = Net(make, extra)
    return gact_graph.wrap(model, min_bytes=0, **options) if options else model

def gradients(model):
    return torch.cat([p.grad.flatten() for p in model.parameters()])

def as_the_whole(make, extra=None):
    """The wrapped models of the parts after a step, which equals a step of one process."""
    stock = built(make, extra)
    expected, gradient = step(stock, data), gradients(stock)
    for options in (dict(level="lossless", bits=32), dict(bits=32, blocks=150)):
        model = built(make, extra, partition=part, **options)
        out = step(model, part)
        sum_gradients(model)
        for got, want in ((out, expected[part.nodes]), (gradients(model), gradient)):
            error = float((got - want).norm() / want.norm())
            assert error < 1e-5, (stock.convs[0], options, error)
        yield stock, model
'''
