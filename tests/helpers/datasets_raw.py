"""Small data sets in the raw formats of OGB, GraphSAINT and Planetoid, and a cut network."""

from __future__ import annotations

import gzip
import json
import pickle
import socket
from collections.abc import Iterable
from pathlib import Path

import numpy as np
import pytest
import scipy.sparse as sp
import torch


def cut_network(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lets every attempt to reach another machine fail at once."""

    def refuse(*args: object, **kwargs: object) -> None:
        raise OSError("network is off")

    monkeypatch.setattr(socket, "getaddrinfo", refuse)
    monkeypatch.setattr(socket.socket, "connect", refuse)


def files_below(folder: Path) -> dict[str, bytes]:
    """Return each file's content."""
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file()
    }


def write_arxiv(home: Path) -> dict[str, torch.Tensor]:
    """Write six papers as OGB ships them; return the expected data."""
    x = torch.arange(24, dtype=torch.float32).view(6, 4) / 8 - 1
    edge_index = torch.tensor([[0, 1, 2, 5, 5], [1, 2, 0, 3, 4]])
    y = torch.tensor([0, 39, 7, 7, 1, 0])
    split = {"train": [0, 2, 5], "valid": [1], "test": [3, 4]}
    _write_csv(home / "raw/edge.csv.gz", edge_index.t().tolist())
    _write_csv(home / "raw/node-feat.csv.gz", x.tolist())
    _write_csv(home / "raw/node-label.csv.gz", y.view(-1, 1).tolist())
    _write_csv(home / "raw/node_year.csv.gz", [[2017]] * 6)
    _write_csv(home / "raw/num-node-list.csv.gz", [[6]])
    _write_csv(home / "raw/num-edge-list.csv.gz", [[5]])
    for part, ids in split.items():
        _write_csv(home / f"split/time/{part}.csv.gz", [[i] for i in ids])
    (home / "RELEASE_v1.txt").touch()
    parts = {f"{part}_idx": torch.tensor(ids) for part, ids in split.items()}
    parts["val_idx"] = parts.pop("valid_idx")
    return {"x": x, "edge_index": edge_index, "y": y, **parts}


def write_saint(home: Path, multi_label: bool) -> dict[str, torch.Tensor]:
    """Write five nodes as GraphSAINT ships them; return the expected data."""
    x = torch.arange(15, dtype=torch.float32).view(5, 3) - 4
    edge_index = torch.tensor([[0, 1, 1, 2, 3, 4], [1, 0, 2, 1, 4, 3]])
    labels = [[1, 0], [0, 1], [1, 1], [0, 0], [1, 0]] if multi_label else [0, 2, 1, 1, 0]
    raw = home / "raw"
    raw.mkdir(parents=True)
    adjacency = sp.csr_matrix((np.ones(6), edge_index.numpy()), shape=(5, 5))
    sp.save_npz(raw / "adj_full.npz", adjacency)
    np.save(raw / "feats.npy", x.double().numpy())
    (raw / "class_map.json").write_text(json.dumps({str(i): y for i, y in enumerate(labels)}))
    (raw / "role.json").write_text(json.dumps({"tr": [4, 0], "va": [1], "te": [2, 3]}))
    return {
        "x": x,
        "edge_index": edge_index,
        "y": torch.tensor(labels, dtype=torch.float32 if multi_label else torch.int64),
        "train_idx": torch.tensor([0, 4]),
        "val_idx": torch.tensor([1]),
        "test_idx": torch.tensor([2, 3]),
    }


def write_planetoid(home: Path, name: str) -> dict[str, torch.Tensor]:
    """Write a ring as Planetoid ships it; return the expected data.

    The reader takes the 500 nodes after the training nodes to validate on, so there are 3 + 500
    nodes before the four test nodes, whose rows are stored in another order than their ids.
    """
    num_train, num_rest, num_test = 3, 503, 4
    num_nodes = num_rest + num_test
    x = torch.arange(num_nodes, dtype=torch.float32).view(-1, 1) * torch.tensor([1.0, 0.5]) + 1
    y = torch.arange(num_nodes) % 3
    one_hot = torch.nn.functional.one_hot(y, 3).numpy()
    test_order = torch.tensor([505, 503, 506, 504])
    neighbors = {i: [(i + 1) % num_nodes, (i - 1) % num_nodes] for i in range(num_nodes)}
    parts = {
        "x": sp.csr_matrix(x[:num_train].numpy()),
        "allx": sp.csr_matrix(x[:num_rest].numpy()),
        "tx": sp.csr_matrix(x[test_order].numpy()),
        "y": one_hot[:num_train],
        "ally": one_hot[:num_rest],
        "ty": one_hot[test_order],
        "graph": neighbors,
    }
    raw = home / "raw"
    raw.mkdir(parents=True)
    for part, content in parts.items():
        (raw / f"ind.{name}.{part}").write_bytes(pickle.dumps(content))
    (raw / f"ind.{name}.test.index").write_text("".join(f"{i}\n" for i in test_order.tolist()))
    ids = torch.arange(num_nodes)
    edges = torch.cat((torch.stack((ids, ids.roll(1))), torch.stack((ids, ids.roll(-1)))), dim=1)
    return {
        "x": x,
        "edge_index": edges,
        "y": y,
        "train_idx": ids[:num_train],
        "val_idx": ids[num_train:num_rest],
        "test_idx": ids[num_rest:],
    }


def _write_csv(path: Path, rows: Iterable[Iterable[object]]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with gzip.open(path, "wt") as file:
        file.writelines(",".join(map(str, row)) + "\n" for row in rows)
