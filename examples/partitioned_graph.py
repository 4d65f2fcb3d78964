"""One graph over several processes, each with a part of the nodes.

Start with ``torchrun --nproc-per-node 2 examples/partitioned_graph.py``; without torchrun there
is a single part. Layers fetch the rows of nodes in other parts, here with 8 bits per element.
Parameters are equal on all processes, and their gradients are summed.
"""

import argparse
import datetime
import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch_geometric import seed_everything
from torch_geometric.datasets import FakeDataset
from torch_geometric.nn import GAT

import gact_graph

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--epochs", type=int, default=10)
parser.add_argument("--nodes", type=int, default=20_000)
args = parser.parse_args()

rank, world = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
if world > 1:
    backend = "nccl" if torch.cuda.is_available() else "gloo"
    # After a minute without another process, all end; see docs/distributed.md for restarts.
    dist.init_process_group(backend, timeout=datetime.timedelta(minutes=1))

seed_everything(0)  # the same graph and the same parameters everywhere
data = FakeDataset(num_graphs=1, avg_num_nodes=args.nodes, num_channels=64, task="node")[0]
data.train_mask = torch.rand(data.num_nodes) < 0.5
total = int(data.train_mask.sum())
model = GAT(64, 128, num_layers=3, out_channels=int(data.y.max()) + 1, heads=4, dropout=0.2)
part = gact_graph.distributed.partition(data, world)[rank]
del data  # from here on, each process holds its part alone

gact_graph.wrap(model, bits=4, partition=part, halo_bits=8)
optimizer = torch.optim.Adam(model.parameters(), lr=0.005)
seed_everything(rank)
for epoch in range(args.epochs):
    model.train()
    optimizer.zero_grad()
    out = model(part.x, part.edge_index)[part.train_mask]
    # A sum over this part's nodes: the gradients of all parts add up to that of the mean over all.
    loss = F.cross_entropy(out, part.y[part.train_mask], reduction="sum") / total
    loss.backward()
    gact_graph.distributed.sum_gradients(model)
    optimizer.step()
    if world > 1:
        dist.all_reduce(loss.detach_())
    if rank == 0:
        print(f"epoch {epoch}: loss {loss:.4f}")

if rank == 0:
    print(gact_graph.report(model))
if world > 1:
    dist.barrier()
    dist.destroy_process_group()
