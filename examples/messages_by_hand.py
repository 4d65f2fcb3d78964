"""Gather and scatter without a layer, as in force fields and weather models, in blocks.

``gact_graph.message_passing`` receives the message function. It runs in wrapped models, which also
compress saved tensors, and in unwrapped ones. In the report, rows with the codec ``blocks`` show
the bytes that the messages would take without blocks.
"""

import argparse

import torch
from torch import Tensor, nn
from torch_geometric import seed_everything
from torch_geometric.datasets import FakeDataset

import gact_graph


class Interaction(nn.Module):
    """What was ``scatter(mlp(cat(x[dst], x[src], e)), dst)`` before."""

    def __init__(self, width: int, edge_features: int) -> None:
        super().__init__()
        self.mlp = nn.Sequential(
            nn.Linear(2 * width + edge_features, 2 * width),
            nn.SiLU(),
            nn.Linear(2 * width, width),
            nn.LayerNorm(width),
        )

    def forward(self, x: Tensor, edge_index: Tensor, edge_attr: Tensor) -> Tensor:
        return x + gact_graph.message_passing(self.message, x, edge_index, edge_attr)

    def message(self, x_i: Tensor, x_j: Tensor, edge_attr: Tensor) -> Tensor:
        return self.mlp(torch.cat([x_i, x_j, edge_attr], dim=-1))


class Net(nn.Module):
    def __init__(self, width: int, edge_features: int, layers: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Interaction(width, edge_features) for _ in range(layers))
        self.head = nn.Linear(width, 1)

    def forward(self, x: Tensor, edge_index: Tensor, edge_attr: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x, edge_index, edge_attr)
        return self.head(x)


parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--epochs", type=int, default=5)
parser.add_argument("--nodes", type=int, default=10_000)
args = parser.parse_args()

seed_everything(0)
data = FakeDataset(1, args.nodes, num_channels=64, edge_dim=8, task="node")[0]
target = data.x.norm(dim=1, keepdim=True)

# min_bytes=0: this graph is small, and would be left alone.
model = gact_graph.wrap(Net(64, 8, layers=3), bits=4, min_bytes=0)
optimizer = torch.optim.Adam(model.parameters(), lr=0.001)
for epoch in range(args.epochs):
    optimizer.zero_grad()
    loss = (model(data.x, data.edge_index, data.edge_attr) - target).square().mean()
    loss.backward()
    optimizer.step()
    print(f"epoch {epoch}: loss {loss:.4f}")

print(gact_graph.report(model))
