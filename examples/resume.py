"""Interrupt and resume: a checkpoint of the model, the optimizer and gact_graph.

``model.state_dict()`` equals that of the unwrapped model. The state of gact_graph (bits per tensor,
sensitivities, counters) is a separate dict of plain numbers. With this state, the resumed run takes
the same steps as an uninterrupted run.
"""

import argparse
import tempfile
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn
from torch_geometric import seed_everything
from torch_geometric.datasets import FakeDataset
from torch_geometric.nn import GAT

import gact_graph

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--epochs", type=int, default=3, help="before the stop, and again after it")
parser.add_argument("--nodes", type=int, default=10_000)
args = parser.parse_args()

seed_everything(0)
data = FakeDataset(num_graphs=1, avg_num_nodes=args.nodes, num_channels=64, task="node")[0]


def start() -> tuple[nn.Module, torch.optim.Optimizer]:
    model = GAT(64, 128, num_layers=3, out_channels=int(data.y.max()) + 1, heads=4)
    gact_graph.wrap(model, bits=4)
    return model, torch.optim.Adam(model.parameters(), lr=0.005)


def train(model: nn.Module, optimizer: torch.optim.Optimizer) -> float:
    for _ in range(args.epochs):
        optimizer.zero_grad()
        loss = F.cross_entropy(model(data.x, data.edge_index), data.y)
        loss.backward()
        optimizer.step()
    return loss.item()


model, optimizer = start()
print(f"loss before the stop: {train(model, optimizer):.6f}")

file = Path(tempfile.mkdtemp()) / "checkpoint.pt"
checkpoint = {
    "model": model.state_dict(),
    "optimizer": optimizer.state_dict(),
    "gact_graph": gact_graph.state_dict(model),
}
torch.save(checkpoint, file)
print(f"loss of the run that went on: {train(model, optimizer):.6f}")

resumed, optimizer = start()
checkpoint = torch.load(file)
resumed.load_state_dict(checkpoint["model"])
optimizer.load_state_dict(checkpoint["optimizer"])
gact_graph.load_state_dict(resumed, checkpoint["gact_graph"])
print(f"loss of the run that was resumed: {train(resumed, optimizer):.6f}")

print(gact_graph.report(resumed))
