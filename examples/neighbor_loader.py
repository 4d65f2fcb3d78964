"""Mini-batches of sampled neighbors, with PyG's NeighborLoader.

PyG samples with pyg-lib or torch-sparse; one of them must be installed. Batches differ in size:
a batch that would save less than ``min_bytes`` runs uncompressed, and larger batches are
compressed. The training loop is unchanged.
"""

import argparse
import sys

import torch
import torch.nn.functional as F
from torch_geometric import seed_everything
from torch_geometric.datasets import FakeDataset
from torch_geometric.loader import NeighborLoader
from torch_geometric.nn import GraphSAGE
from torch_geometric.typing import WITH_PYG_LIB, WITH_TORCH_SPARSE

import gact_graph

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--epochs", type=int, default=3)
parser.add_argument("--nodes", type=int, default=20_000)
parser.add_argument("--batch-size", type=int, default=1024)
args = parser.parse_args()

seed_everything(0)
data = FakeDataset(num_graphs=1, avg_num_nodes=args.nodes, num_channels=64, task="node")[0]
train = torch.rand(data.num_nodes) < 0.5
if not (WITH_PYG_LIB or WITH_TORCH_SPARSE):
    sys.exit("PyG samples neighbors with pyg-lib or torch-sparse: install one of them")
loader = NeighborLoader(
    data, num_neighbors=[15, 10, 5], input_nodes=train, batch_size=args.batch_size, shuffle=True
)

model = GraphSAGE(64, 256, num_layers=3, out_channels=int(data.y.max()) + 1, dropout=0.2)
gact_graph.wrap(model, bits=4)
optimizer = torch.optim.Adam(model.parameters(), lr=0.005)

model.train()
for epoch in range(args.epochs):
    total = 0.0
    for batch in loader:
        optimizer.zero_grad()
        out = model(batch.x, batch.edge_index)[: batch.batch_size]  # the first rows are the seeds
        loss = F.cross_entropy(out, batch.y[: batch.batch_size])
        loss.backward()
        optimizer.step()
        total += loss.item() * batch.batch_size
    print(f"epoch {epoch}: loss {total / int(train.sum()):.4f}")

print(gact_graph.report(model))  # of the last batch
