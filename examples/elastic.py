"""A run that torchrun restarts after a failure, from its last checkpoint.

Start with ``torchrun --nproc-per-node 2 --max-restarts 1 examples/elastic.py --fail-after 1``:
rank 1 fails once after the first epoch, and torchrun starts all processes again. Each start loads
the checkpoint, which contains the state of gact_graph. Losses and bits equal those of a run that
never fails.
"""

import argparse
import os
from pathlib import Path

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
parser.add_argument("--fail-after", type=int, help="the epoch, from 0, after which rank 1 fails")
parser.add_argument("--checkpoint", type=Path, default="elastic.pt")
args = parser.parse_args()

rank, world = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
start = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
if world > 1:
    # torchrun keeps its store, in which gloo would find the addresses of processes that ended.
    store = dist.TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]))
    store = dist.PrefixStore(f"start {start}", store)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world)

seed_everything(0)  # the same graph and the same parameters everywhere
data = FakeDataset(num_graphs=1, avg_num_nodes=args.nodes, num_channels=64, task="node")[0]
model = gact_graph.wrap(GCN(64, 256, 3, int(data.y.max()) + 1, dropout=0.2), bits=4)
optimizer = torch.optim.Adam(model.parameters(), lr=0.005)

first = 0
if start != "0" and args.checkpoint.exists():
    checkpoint = torch.load(args.checkpoint)
    model.load_state_dict(checkpoint["model"])
    optimizer.load_state_dict(checkpoint["optimizer"])
    gact_graph.load_state_dict(model, checkpoint["gact_graph"])
    first = checkpoint["epoch"] + 1

parallel = DistributedDataParallel(model) if world > 1 else model
loader = RandomNodeLoader(data, num_parts=4, shuffle=True)
for epoch in range(first, args.epochs):
    seed_everything(1000 * epoch + rank)  # the batches and the dropout of this epoch
    for batch in loader:
        optimizer.zero_grad()
        loss = F.cross_entropy(parallel(batch.x, batch.edge_index), batch.y)
        loss.backward()
        optimizer.step()
    if rank == 0:
        print(f"epoch {epoch}: loss {loss:.6f}", flush=True)
        states = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
        states |= {"gact_graph": gact_graph.state_dict(model), "epoch": epoch}
        torch.save(states, args.checkpoint)
    if world > 1:
        dist.barrier()  # the checkpoint is complete
    if epoch == args.fail_after and rank == 1 and start == "0":
        os._exit(1)  # a failure, as of a machine

if rank == 0:
    print(gact_graph.report(model))
if world > 1:
    dist.barrier()
    del parallel  # before the group, or the process may not exit
    dist.destroy_process_group()
