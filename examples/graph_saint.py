"""Mini-batches of subgraphs, as in GraphSAINT, with PyG's GraphSAINTRandomWalkSampler.

PyG samples the subgraphs with torch-sparse, and weights the loss of a node by how often the node is
sampled. The training loop is unchanged.
"""

import argparse
import sys

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch_geometric import seed_everything
from torch_geometric.datasets import FakeDataset
from torch_geometric.loader import GraphSAINTRandomWalkSampler
from torch_geometric.nn import GraphConv
from torch_geometric.typing import WITH_TORCH_SPARSE

import gact_graph


class Net(nn.Module):
    def __init__(self, hidden: int, classes: int) -> None:
        super().__init__()
        widths = (64, hidden, hidden)
        self.convs = nn.ModuleList(GraphConv(width, hidden, aggr="mean") for width in widths)
        self.head = nn.Linear(3 * hidden, classes)

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        layers = []
        for conv in self.convs:
            x = F.dropout(conv(x, edge_index).relu(), 0.2, self.training)
            layers.append(x)
        return self.head(torch.cat(layers, dim=-1))


parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--epochs", type=int, default=3)
parser.add_argument("--nodes", type=int, default=20_000)
args = parser.parse_args()

seed_everything(0)
data = FakeDataset(num_graphs=1, avg_num_nodes=args.nodes, num_channels=64, task="node")[0]
if not WITH_TORCH_SPARSE:
    sys.exit("PyG samples subgraphs with torch-sparse: install it")
loader = GraphSAINTRandomWalkSampler(
    data, batch_size=args.nodes // 8, walk_length=2, num_steps=5, sample_coverage=10, log=False
)

model = gact_graph.wrap(Net(256, int(data.y.max()) + 1), bits=4)
optimizer = torch.optim.Adam(model.parameters(), lr=0.001)

model.train()
for epoch in range(args.epochs):
    total = 0.0
    for batch in loader:
        optimizer.zero_grad()
        losses = F.cross_entropy(model(batch.x, batch.edge_index), batch.y, reduction="none")
        loss = (losses * batch.node_norm).sum()
        loss.backward()
        optimizer.step()
        total += loss.item() / len(loader)
    print(f"epoch {epoch}: loss {total:.4f}")

print(gact_graph.report(model))  # of the last batch
