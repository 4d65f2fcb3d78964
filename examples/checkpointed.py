"""torch's checkpoint for some layers, and compression for the others.

A checkpointed layer saves its inputs only, uncompressed, and runs again in backward. Here the first
layer is checkpointed: its input, the features of the nodes, takes no further memory. The tensors of
the other layers are compressed. At ``level="lossless"``, gradients are those of stock PyG.
"""

import argparse

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from torch_geometric import seed_everything
from torch_geometric.datasets import FakeDataset
from torch_geometric.nn import GATConv

import gact_graph


class Net(nn.Module):
    def __init__(self, hidden: int, classes: int) -> None:
        super().__init__()
        widths = (64, hidden, hidden)
        self.convs = nn.ModuleList(GATConv(width, hidden // 4, heads=4) for width in widths)
        self.norms = nn.ModuleList(nn.BatchNorm1d(hidden) for _ in widths)
        self.head = nn.Linear(hidden, classes)

    def layer(self, number: int, x: Tensor, edge_index: Tensor) -> Tensor:
        x = self.norms[number](self.convs[number](x, edge_index)).relu()
        return F.dropout(x, 0.2, self.training)

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        x = checkpoint(self.layer, 0, x, edge_index, use_reentrant=False)
        for number in (1, 2):
            x = self.layer(number, x, edge_index)
        return self.head(x)


parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--epochs", type=int, default=5)
parser.add_argument("--nodes", type=int, default=20_000)
args = parser.parse_args()

seed_everything(0)
data = FakeDataset(num_graphs=1, avg_num_nodes=args.nodes, num_channels=64, task="node")[0]
model = gact_graph.wrap(Net(256, int(data.y.max()) + 1), bits=4)
optimizer = torch.optim.Adam(model.parameters(), lr=0.005)

model.train()
for epoch in range(args.epochs):
    optimizer.zero_grad()
    loss = F.cross_entropy(model(data.x, data.edge_index), data.y)
    loss.backward()
    optimizer.step()
    print(f"epoch {epoch}: loss {loss:.4f}")

print(gact_graph.report(model))
