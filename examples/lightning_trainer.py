"""Training with Lightning: a callback in place of ``gact_graph.wrap``.

The callback wraps the module while the Trainer fits it, logs five scalars, and adds the state of
gact_graph to the checkpoints, so that ``fit(..., ckpt_path=...)`` continues with the same bits. The
scalars go to the Trainer's logger, here to a CSV file; TensorBoardLogger and WandbLogger get the
same.
"""

import argparse

import lightning
import torch
import torch.nn.functional as F
from lightning.pytorch.loggers import CSVLogger
from torch import Tensor
from torch_geometric import seed_everything
from torch_geometric.data import Data
from torch_geometric.datasets import FakeDataset
from torch_geometric.loader import DataLoader
from torch_geometric.nn import GAT

from gact_graph.lightning import Compression


class Module(lightning.LightningModule):
    def __init__(self, classes: int) -> None:
        super().__init__()
        self.gnn = GAT(64, 128, num_layers=3, out_channels=classes, heads=4)

    def training_step(self, batch: Data, index: int) -> Tensor:
        loss = F.cross_entropy(self.gnn(batch.x, batch.edge_index), batch.y)
        self.log("loss", loss, batch_size=1, prog_bar=True)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters(), lr=0.005)


parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--epochs", type=int, default=3)
parser.add_argument("--nodes", type=int, default=10_000, help="of each graph, about")
parser.add_argument("--folder", default=".", help="for Lightning's logs and checkpoints")
args = parser.parse_args()

seed_everything(0)
dataset = FakeDataset(num_graphs=4, avg_num_nodes=args.nodes, num_channels=64, task="node")
compression = Compression(bits=4)
trainer = lightning.Trainer(
    max_epochs=args.epochs,
    accelerator="auto",
    callbacks=[compression],
    default_root_dir=args.folder,
    log_every_n_steps=1,
    logger=CSVLogger(args.folder),
)
trainer.fit(Module(dataset.num_classes), DataLoader(dataset, batch_size=1, shuffle=True))

print({name: round(float(value), 3) for name, value in trainer.logged_metrics.items()})
print(compression.report)
