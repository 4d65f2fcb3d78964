"""GraphGym: a registered network that is wrapped.

``@register_network`` registers the network under a name, and ``model.type`` of the configuration
selects it. The remaining script is that of GraphGym, with a configuration in place of a YAML file.
GraphGym requires Lightning and yacs.
"""

import argparse
import tempfile

import torch
from torch_geometric import seed_everything
from torch_geometric.datasets import FakeDataset
from torch_geometric.graphgym.config import assert_cfg, cfg, set_cfg
from torch_geometric.graphgym.model_builder import create_model
from torch_geometric.graphgym.models.gnn import GNN
from torch_geometric.graphgym.register import register_loader, register_network
from torch_geometric.graphgym.train import GraphGymDataModule, train

import gact_graph

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--epochs", type=int, default=3)
parser.add_argument("--nodes", type=int, default=20_000)
args = parser.parse_args()


@register_network("compressed_gnn")
def compressed_gnn(dim_in: int, dim_out: int) -> GNN:
    return gact_graph.wrap(GNN(dim_in, dim_out), bits=4)


seed_everything(0)
dataset = FakeDataset(num_graphs=1, avg_num_nodes=args.nodes, num_channels=64, task="node")
for split in ("train_mask", "val_mask", "test_mask"):
    dataset._data[split] = torch.rand(dataset._data.num_nodes) < 0.3
dataset.slices = None  # there is one graph
register_loader("fake", lambda form, name, folder: dataset if name == "fake" else None)

set_cfg(cfg)
options = ["dataset.name", "fake", "dataset.task", "node", "dataset.task_type", "classification"]
options += ["gnn.layer_type", "gatconv", "gnn.dim_inner", 128, "gnn.layers_mp", 3]
options += ["optim.max_epoch", args.epochs, "model.type", "compressed_gnn", "accelerator", "cpu"]
options += ["train.enable_ckpt", False, "out_dir", tempfile.mkdtemp()]
cfg.merge_from_list(options)
assert_cfg(cfg)

datamodule = GraphGymDataModule()
model = create_model()
train(model, datamodule, logger=False, trainer_config={"logger": False})
print(gact_graph.report(model.model))
