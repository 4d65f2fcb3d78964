"""Mini-batches of clusters, as in Cluster-GCN, with PyG's ClusterLoader.

METIS divides the graph into parts, and each batch joins several parts. PyG needs pyg-lib for this,
or torch-sparse built with METIS. The training loop equals full-batch training on a smaller graph.
"""

import argparse
import sys

import torch
import torch.nn.functional as F
from torch_geometric import seed_everything
from torch_geometric.datasets import FakeDataset
from torch_geometric.loader import ClusterData, ClusterLoader
from torch_geometric.nn import GCN

import gact_graph

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--epochs", type=int, default=3)
parser.add_argument("--nodes", type=int, default=20_000)
parser.add_argument("--parts", type=int, default=20)
args = parser.parse_args()

seed_everything(0)
data = FakeDataset(num_graphs=1, avg_num_nodes=args.nodes, num_channels=64, task="node")[0]
data.train_mask = torch.rand(data.num_nodes) < 0.5
try:
    clusters = ClusterData(data, num_parts=args.parts)
except ImportError:
    sys.exit("PyG cuts graphs with METIS: install pyg-lib, or torch-sparse that was built with it")
loader = ClusterLoader(clusters, batch_size=5, shuffle=True)

model = GCN(64, 256, num_layers=4, out_channels=int(data.y.max()) + 1, dropout=0.2)
gact_graph.wrap(model, bits=4)
optimizer = torch.optim.Adam(model.parameters(), lr=0.005)

model.train()
for epoch in range(args.epochs):
    total = 0.0
    for batch in loader:
        optimizer.zero_grad()
        out = model(batch.x, batch.edge_index)
        loss = F.cross_entropy(out[batch.train_mask], batch.y[batch.train_mask])
        loss.backward()
        optimizer.step()
        total += loss.item() * int(batch.train_mask.sum())
    print(f"epoch {epoch}: loss {total / int(data.train_mask.sum()):.4f}")

print(gact_graph.report(model))  # of the last batch
