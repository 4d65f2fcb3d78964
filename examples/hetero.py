"""A heterogeneous graph: to_hetero converts a model for one node type to several types.

Wrap the result of ``to_hetero``, not its argument: ``to_hetero`` copies the layers, and a copy of a
wrapped layer is not wrapped.
"""

import argparse

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch_geometric import seed_everything
from torch_geometric.datasets import FakeHeteroDataset
from torch_geometric.nn import SAGEConv, to_hetero

import gact_graph


class Sage(nn.Module):
    def __init__(self, hidden: int, classes: int) -> None:
        super().__init__()
        self.first = SAGEConv((-1, -1), hidden)
        self.second = SAGEConv((-1, -1), hidden)
        self.head = nn.Linear(hidden, classes)

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        x = self.first(x, edge_index).relu()
        x = self.second(x, edge_index).relu()
        return self.head(x)


parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--epochs", type=int, default=5)
parser.add_argument("--nodes", type=int, default=10_000, help="of each kind, about")
args = parser.parse_args()

seed_everything(0)
data = FakeHeteroDataset(1, num_node_types=2, num_edge_types=4, avg_num_nodes=args.nodes)[0]
labelled = data["v0"].y

model = to_hetero(Sage(128, int(labelled.max()) + 1), data.metadata())
with torch.no_grad():
    model(data.x_dict, data.edge_index_dict)  # gives the lazy layers their sizes
gact_graph.wrap(model, bits=4)
optimizer = torch.optim.Adam(model.parameters(), lr=0.005)

model.train()
for epoch in range(args.epochs):
    optimizer.zero_grad()
    out = model(data.x_dict, data.edge_index_dict)["v0"]
    loss = F.cross_entropy(out, labelled)
    loss.backward()
    optimizer.step()
    print(f"epoch {epoch}: loss {loss:.4f}")

print(gact_graph.report(model))
