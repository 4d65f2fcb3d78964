"""Mini-batches on several processes, with torch's DistributedDataParallel.

Start with ``torchrun --nproc-per-node 2 examples/data_parallel.py``; without torchrun, the script
runs in one process. The model is wrapped before it is passed to DistributedDataParallel, with or
without ``static_graph``. All processes agree on the same bits.
"""

import argparse
import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel
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
if world > 1:
    dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")

seed_everything(0)  # the same graph and the same parameters everywhere
data = FakeDataset(num_graphs=1, avg_num_nodes=args.nodes, num_channels=64, task="node")[0]
model = gact_graph.wrap(GCN(64, 256, 3, int(data.y.max()) + 1, dropout=0.2), bits=4)
parallel = DistributedDataParallel(model, static_graph=True) if world > 1 else model
optimizer = torch.optim.Adam(parallel.parameters(), lr=0.005)

seed_everything(rank)  # other batches on each process, but as many
loader = RandomNodeLoader(data, num_parts=4, shuffle=True)
for epoch in range(args.epochs):
    for batch in loader:
        optimizer.zero_grad()
        loss = F.cross_entropy(parallel(batch.x, batch.edge_index), batch.y)
        loss.backward()
        optimizer.step()
    if rank == 0:
        print(f"epoch {epoch}: loss {loss:.4f}")

if rank == 0:
    print(gact_graph.report(model))
if world > 1:
    dist.barrier()
    del parallel  # before the group, or the process may not exit
    dist.destroy_process_group()
