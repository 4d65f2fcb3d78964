"""Mixed precision: forward in bf16 under torch.autocast, parameters in fp32.

autograd saves bf16 tensors, and gact_graph compresses them: 4 bits are a quarter of their size. The
training loop is PyTorch's own recipe.
"""

import argparse

import torch
import torch.nn.functional as F
from torch_geometric import seed_everything
from torch_geometric.datasets import FakeDataset
from torch_geometric.nn import GAT

import gact_graph

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--epochs", type=int, default=5)
parser.add_argument("--nodes", type=int, default=20_000)
parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
args = parser.parse_args()

seed_everything(0)
dataset = FakeDataset(num_graphs=1, avg_num_nodes=args.nodes, num_channels=64, task="node")
data = dataset[0].to(args.device)

model = GAT(64, 128, num_layers=3, out_channels=dataset.num_classes, heads=4).to(args.device)
gact_graph.wrap(model, bits=4)
optimizer = torch.optim.Adam(model.parameters(), lr=0.005)

model.train()
for epoch in range(args.epochs):
    optimizer.zero_grad()
    with torch.autocast(torch.device(args.device).type, dtype=torch.bfloat16):
        loss = F.cross_entropy(model(data.x, data.edge_index), data.y)
    loss.backward()
    optimizer.step()
    print(f"epoch {epoch}: loss {loss:.4f}")

print(gact_graph.report(model))
