"""Link prediction on sampled edges, with PyG's LinkNeighborLoader.

PyG samples with pyg-lib or torch-sparse; one of them must be installed. The wrapped model returns
embeddings of nodes, and the score of an edge, outside of the model, is as in PyG.
"""

import argparse
import sys

import torch
import torch.nn.functional as F
from torch_geometric import seed_everything
from torch_geometric.datasets import FakeDataset
from torch_geometric.loader import LinkNeighborLoader
from torch_geometric.nn import GraphSAGE
from torch_geometric.typing import WITH_PYG_LIB, WITH_TORCH_SPARSE

import gact_graph

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--epochs", type=int, default=1)
parser.add_argument("--nodes", type=int, default=5_000)
args = parser.parse_args()

seed_everything(0)
data = FakeDataset(num_graphs=1, avg_num_nodes=args.nodes, num_channels=64, task="node")[0]
if not (WITH_PYG_LIB or WITH_TORCH_SPARSE):
    sys.exit("PyG samples neighbors with pyg-lib or torch-sparse: install one of them")
loader = LinkNeighborLoader(
    data, num_neighbors=[15, 10], batch_size=4096, shuffle=True, neg_sampling_ratio=1.0
)

model = gact_graph.wrap(GraphSAGE(64, 256, num_layers=2, out_channels=64, dropout=0.2), bits=4)
optimizer = torch.optim.Adam(model.parameters(), lr=0.001)

model.train()
for epoch in range(args.epochs):
    total = 0.0
    for batch in loader:
        optimizer.zero_grad()
        x = model(batch.x, batch.edge_index)
        source, target = batch.edge_label_index
        loss = F.binary_cross_entropy_with_logits((x[source] * x[target]).sum(-1), batch.edge_label)
        loss.backward()
        optimizer.step()
        total += loss.item() / len(loader)
    print(f"epoch {epoch}: loss {total:.4f}")

print(gact_graph.report(model))  # of the last batch
