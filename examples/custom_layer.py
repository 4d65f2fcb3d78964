"""A custom message passing layer, which requires no registration.

Its ``message`` runs in blocks of destination nodes, like the layers of PyG. The report lists the
layer with its number of blocks, or the reason why it runs as in PyG.
"""

import argparse

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch_geometric import seed_everything
from torch_geometric.datasets import FakeDataset
from torch_geometric.nn import MessagePassing

import gact_graph


class GatedConv(MessagePassing):
    """Sums messages of the sources through a gate that both ends open."""

    def __init__(self, width: int) -> None:
        super().__init__(aggr="sum")
        self.gate = nn.Sequential(nn.Linear(2 * width, width), nn.ReLU(), nn.Linear(width, width))
        self.lin = nn.Linear(width, width)

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        return x + self.propagate(edge_index, x=x, values=self.lin(x))

    def message(self, x_i: Tensor, x_j: Tensor, values_j: Tensor) -> Tensor:
        return self.gate(torch.cat([x_i, x_j], dim=-1)).sigmoid() * values_j


class Net(nn.Module):
    def __init__(self, classes: int) -> None:
        super().__init__()
        self.convs = nn.ModuleList(GatedConv(64) for _ in range(3))
        self.norms = nn.ModuleList(nn.BatchNorm1d(64) for _ in range(3))
        self.head = nn.Linear(64, classes)

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        for conv, norm in zip(self.convs, self.norms, strict=True):
            x = norm(conv(x, edge_index)).relu()
        return self.head(x)


parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--epochs", type=int, default=5)
parser.add_argument("--nodes", type=int, default=10_000)
args = parser.parse_args()

seed_everything(0)
data = FakeDataset(num_graphs=1, avg_num_nodes=args.nodes, num_channels=64, task="node")[0]
model = gact_graph.wrap(Net(int(data.y.max()) + 1), bits=4)
optimizer = torch.optim.Adam(model.parameters(), lr=0.005)

model.train()
for epoch in range(args.epochs):
    optimizer.zero_grad()
    loss = F.cross_entropy(model(data.x, data.edge_index), data.y)
    loss.backward()
    optimizer.step()
    print(f"epoch {epoch}: loss {loss:.4f}")

print(gact_graph.report(model))
