"""Full-batch training of a graph attention network: the whole graph in every step.

One line is new: ``gact_graph.wrap``. The report at the end shows the bytes that the step held for
backward, and the bytes that stock PyTorch would have held.
"""

import argparse

import torch
import torch.nn.functional as F
from torch_geometric import seed_everything
from torch_geometric.datasets import FakeDataset
from torch_geometric.nn import GAT

import gact_graph

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--epochs", type=int, default=10)
parser.add_argument("--nodes", type=int, default=20_000)
args = parser.parse_args()

seed_everything(0)
data = FakeDataset(num_graphs=1, avg_num_nodes=args.nodes, num_channels=64, task="node")[0]
train = torch.rand(data.num_nodes) < 0.5

model = GAT(64, 128, num_layers=3, out_channels=int(data.y.max()) + 1, heads=4, dropout=0.2)
gact_graph.wrap(model, bits=4)
optimizer = torch.optim.Adam(model.parameters(), lr=0.005)

for epoch in range(args.epochs):
    model.train()
    optimizer.zero_grad()
    loss = F.cross_entropy(model(data.x, data.edge_index)[train], data.y[train])
    loss.backward()
    optimizer.step()

    model.eval()
    with torch.no_grad():
        right = model(data.x, data.edge_index).argmax(dim=-1) == data.y
    print(f"epoch {epoch}: loss {loss:.4f}, test accuracy {right[~train].float().mean():.3f}")

print(gact_graph.report(model))
