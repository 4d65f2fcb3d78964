"""A MeshGraphNet with PyG's MetaLayer: edges have features, which each layer updates.

The edge model reads both nodes of every edge. In a wrapped model, it runs in blocks of edges.
"""

import argparse

import torch
from torch import Tensor, nn
from torch_geometric import seed_everything
from torch_geometric.datasets import FakeDataset
from torch_geometric.nn import MetaLayer
from torch_geometric.utils import scatter

import gact_graph

HIDDEN = 64


def mlp(width: int) -> nn.Sequential:
    # Not PyG's LayerNorm: it normalizes over all edges, and runs without blocks.
    return nn.Sequential(nn.Linear(width, HIDDEN), nn.ReLU(), nn.LayerNorm(HIDDEN))


class EdgeModel(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.mlp = mlp(3 * HIDDEN)

    def forward(self, src: Tensor, dest: Tensor, edge_attr: Tensor, u: None, batch: None) -> Tensor:
        return edge_attr + self.mlp(torch.cat([src, dest, edge_attr], dim=-1))


class NodeModel(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.mlp = mlp(2 * HIDDEN)

    def forward(
        self, x: Tensor, edge_index: Tensor, edge_attr: Tensor, u: None, batch: None
    ) -> Tensor:
        given = scatter(edge_attr, edge_index[1], dim=0, dim_size=x.size(0), reduce="sum")
        return x + self.mlp(torch.cat([x, given], dim=-1))


class MeshGraphNet(nn.Module):
    def __init__(self, node_features: int, edge_features: int, steps: int) -> None:
        super().__init__()
        self.nodes = mlp(node_features)
        self.edges = mlp(edge_features)
        self.steps = nn.ModuleList(MetaLayer(EdgeModel(), NodeModel()) for _ in range(steps))
        self.head = nn.Linear(HIDDEN, 3)

    def forward(self, x: Tensor, edge_index: Tensor, edge_attr: Tensor) -> Tensor:
        x, edge_attr = self.nodes(x), self.edges(edge_attr)
        for step in self.steps:
            x, edge_attr, _ = step(x, edge_index, edge_attr)
        return self.head(x)


parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--epochs", type=int, default=3)
parser.add_argument("--nodes", type=int, default=10_000)
args = parser.parse_args()

seed_everything(0)
data = FakeDataset(1, args.nodes, num_channels=8, edge_dim=4, task="node")[0]
target = torch.stack([data.x.sum(1), data.x.std(1), data.x.amax(1)], dim=1)

model = gact_graph.wrap(MeshGraphNet(8, 4, steps=4), bits=4)
optimizer = torch.optim.Adam(model.parameters(), lr=0.001)
for epoch in range(args.epochs):
    optimizer.zero_grad()
    loss = (model(data.x, data.edge_index, data.edge_attr) - target).square().mean()
    loss.backward()
    optimizer.step()
    print(f"epoch {epoch}: loss {loss:.4f}")

print(gact_graph.report(model))
