"""A subgraph around each node of a batch, as in ShaDow, with PyG's ShaDowKHopSampler.

PyG samples the subgraphs with torch-sparse. A batch joins the subgraphs, so message passing runs on
all of them at once, and a readout returns one row per node of the batch.
"""

import argparse
import sys

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch_geometric import seed_everything
from torch_geometric.datasets import FakeDataset
from torch_geometric.loader import ShaDowKHopSampler
from torch_geometric.nn import GraphSAGE, global_mean_pool
from torch_geometric.typing import WITH_TORCH_SPARSE

import gact_graph


class Net(nn.Module):
    def __init__(self, hidden: int, classes: int) -> None:
        super().__init__()
        self.gnn = GraphSAGE(64, hidden, num_layers=3, dropout=0.2)
        self.head = nn.Linear(2 * hidden, classes)

    def forward(self, x: Tensor, edge_index: Tensor, graph: Tensor, root: Tensor) -> Tensor:
        x = self.gnn(x, edge_index)
        return self.head(torch.cat([x[root], global_mean_pool(x, graph)], dim=-1))


parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--epochs", type=int, default=3)
parser.add_argument("--nodes", type=int, default=5_000)
args = parser.parse_args()

seed_everything(0)
data = FakeDataset(num_graphs=1, avg_num_nodes=args.nodes, num_channels=64, task="node")[0]
if not WITH_TORCH_SPARSE:
    sys.exit("PyG samples subgraphs with torch-sparse: install it")
loader = ShaDowKHopSampler(data, depth=2, num_neighbors=5, batch_size=500, shuffle=True)

model = gact_graph.wrap(Net(256, int(data.y.max()) + 1), bits=4)
optimizer = torch.optim.Adam(model.parameters(), lr=0.005)

model.train()
for epoch in range(args.epochs):
    total = 0.0
    for batch in loader:
        optimizer.zero_grad()
        out = model(batch.x, batch.edge_index, batch.batch, batch.root_n_id)
        loss = F.cross_entropy(out, batch.y)
        loss.backward()
        optimizer.step()
        total += loss.item() / len(loader)
    print(f"epoch {epoch}: loss {total:.4f}")

print(gact_graph.report(model))  # of the last batch
