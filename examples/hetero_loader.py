"""Mini-batches of a heterogeneous graph, with PyG's NeighborLoader and HeteroConv.

PyG samples with pyg-lib or torch-sparse; one of them must be installed. PyG's HGTLoader samples
with either of them, too, and its batches have the same form.
"""

import argparse
import sys

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch_geometric import seed_everything
from torch_geometric.datasets import FakeHeteroDataset
from torch_geometric.loader import NeighborLoader
from torch_geometric.nn import HeteroConv, SAGEConv
from torch_geometric.typing import WITH_PYG_LIB, WITH_TORCH_SPARSE

import gact_graph


class Net(nn.Module):
    def __init__(self, edge_types: list[tuple[str, str, str]], hidden: int, classes: int) -> None:
        super().__init__()
        self.convs = nn.ModuleList(
            HeteroConv({kind: SAGEConv((-1, -1), hidden) for kind in edge_types}) for _ in range(2)
        )
        self.head = nn.Linear(hidden, classes)

    def forward(self, x: dict[str, Tensor], edge_index: dict[tuple, Tensor]) -> Tensor:
        for conv in self.convs:
            x = {kind: h.relu() for kind, h in conv(x, edge_index).items()}
        return self.head(x["v0"])


parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--epochs", type=int, default=3)
parser.add_argument("--nodes", type=int, default=10_000, help="of each kind, about")
args = parser.parse_args()

seed_everything(0)
data = FakeHeteroDataset(1, num_node_types=2, num_edge_types=4, avg_num_nodes=args.nodes)[0]
if not (WITH_PYG_LIB or WITH_TORCH_SPARSE):
    sys.exit("PyG samples neighbors with pyg-lib or torch-sparse: install one of them")
loader = NeighborLoader(
    data, num_neighbors=[15, 10], input_nodes="v0", batch_size=2048, shuffle=True
)

model = Net(data.edge_types, 256, int(data["v0"].y.max()) + 1)
with torch.no_grad():
    model(data.x_dict, data.edge_index_dict)  # gives the lazy layers their sizes
gact_graph.wrap(model, bits=4)
optimizer = torch.optim.Adam(model.parameters(), lr=0.005)

model.train()
for epoch in range(args.epochs):
    total = 0.0
    for batch in loader:
        optimizer.zero_grad()
        seeds = batch["v0"].batch_size  # the first rows are the seeds
        out = model(batch.x_dict, batch.edge_index_dict)[:seeds]
        loss = F.cross_entropy(out, batch["v0"].y[:seeds])
        loss.backward()
        optimizer.step()
        total += loss.item() / len(loader)
    print(f"epoch {epoch}: loss {total:.4f}")

print(gact_graph.report(model))  # of the last batch
