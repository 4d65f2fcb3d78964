"""Sharded parameters on several processes, with torch's FSDP2 (``fully_shard``).

Start with ``torchrun --nproc-per-node 2 examples/fully_sharded.py``; without torchrun, the script
runs in one process and shards nothing. The model is wrapped before ``fully_shard``. Sensitivities
are not measured with sharded parameters, so all tensors have the same bits.
"""

import argparse
import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch_geometric import seed_everything
from torch_geometric.datasets import FakeDataset
from torch_geometric.loader import RandomNodeLoader
from torch_geometric.nn import GCN

import gact_graph

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--epochs", type=int, default=3)
parser.add_argument("--nodes", type=int, default=20_000)
args = parser.parse_args()

rank, world = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
device = torch.device("cuda", rank) if torch.cuda.is_available() and world > 1 else "cpu"
if world > 1:
    dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")

seed_everything(0)  # the same graph and the same parameters everywhere
data = FakeDataset(num_graphs=1, avg_num_nodes=args.nodes, num_channels=64, task="node")[0]
model = GCN(64, 256, num_layers=3, out_channels=int(data.y.max()) + 1, dropout=0.2).to(device)
gact_graph.wrap(model, bits=4, adaptive=False)
if world > 1:
    mesh = init_device_mesh(torch.device(device).type, (world,))
    for conv in model.convs:
        fully_shard(conv, mesh=mesh)
    fully_shard(model, mesh=mesh)
optimizer = torch.optim.Adam(model.parameters(), lr=0.005)

seed_everything(rank)  # other batches on each process, but as many
loader = RandomNodeLoader(data, num_parts=4, shuffle=True)
for epoch in range(args.epochs):
    for batch in loader:
        batch = batch.to(device)
        optimizer.zero_grad()
        loss = F.cross_entropy(model(batch.x, batch.edge_index), batch.y)
        loss.backward()
        optimizer.step()
    if rank == 0:
        print(f"epoch {epoch}: loss {loss:.4f}")

if rank == 0:
    print(gact_graph.report(model))
if world > 1:
    dist.barrier()
    dist.destroy_process_group()
