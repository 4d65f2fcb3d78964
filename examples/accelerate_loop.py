"""Training with Hugging Face's accelerate, in bf16, and its checkpoints.

The model is wrapped before ``prepare``. ``register_for_checkpointing`` adds the state of gact_graph
to ``save_state`` and ``load_state``, so that a resumed run continues with the same bits. On several
processes, start with ``accelerate launch``. A model for the Trainer of transformers is wrapped
likewise, before it is passed to the Trainer.
"""

import argparse
import tempfile
from typing import Any

import torch
import torch.nn.functional as F
from accelerate import Accelerator
from torch import nn
from torch_geometric import seed_everything
from torch_geometric.datasets import FakeDataset
from torch_geometric.loader import DataLoader
from torch_geometric.nn import GAT

import gact_graph


class Compression:
    """The state of gact_graph in accelerate's checkpoints."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model

    def state_dict(self) -> dict[str, Any]:
        return gact_graph.state_dict(self.model)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        gact_graph.load_state_dict(self.model, state)


parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--epochs", type=int, default=3)
parser.add_argument("--nodes", type=int, default=10_000, help="of each graph, about")
args = parser.parse_args()

seed_everything(0)
dataset = FakeDataset(num_graphs=4, avg_num_nodes=args.nodes, num_channels=64, task="node")
model = GAT(64, 128, num_layers=3, out_channels=dataset.num_classes, heads=4)
gact_graph.wrap(model, bits=4)

accelerator = Accelerator(mixed_precision="bf16")
accelerator.register_for_checkpointing(Compression(model))
prepared, optimizer, loader = accelerator.prepare(
    model,
    torch.optim.Adam(model.parameters(), lr=0.005),
    DataLoader(dataset, batch_size=1, shuffle=True),
)

prepared.train()
for epoch in range(args.epochs):
    for batch in loader:
        optimizer.zero_grad()
        loss = F.cross_entropy(prepared(batch.x, batch.edge_index), batch.y)
        accelerator.backward(loss)
        optimizer.step()
    accelerator.print(f"epoch {epoch}: loss {loss:.4f}")

with tempfile.TemporaryDirectory() as folder:
    accelerator.save_state(folder)
    accelerator.load_state(folder)
accelerator.print(gact_graph.report(model))
