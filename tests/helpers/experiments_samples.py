"""Small inputs that the tests of ``experiments`` share."""

from __future__ import annotations

from typing import Any

import torch

from datasets import Graph


def small_graph(*, multi_label: bool = False) -> Graph:
    """60 nodes in 3 classes; edges, one way each, stay inside a class; features hint at it."""
    generator = torch.Generator().manual_seed(0)
    y = torch.arange(60) % 3
    source = torch.randint(60, (150,), generator=generator)
    # A multiple of 3 further on lies in the same class.
    target = (source + 3 * torch.randint(1, 19, (150,), generator=generator)) % 60
    x = torch.nn.functional.one_hot(y, 3).float() + torch.randn(60, 3, generator=generator)
    if multi_label:
        y = torch.stack([y == 0, y == 1, y >= 1], dim=1).float()
    return Graph(
        name="small",
        x=x,
        edge_index=torch.stack([source, target]),
        y=y,
        num_classes=3,
        train_idx=torch.arange(0, 30),
        val_idx=torch.arange(30, 45),
        test_idx=torch.arange(45, 60),
    )


def record(seed: int, **changes: Any) -> dict[str, Any]:
    """The record of one seed after two epochs."""
    return {
        "seed": seed,
        "test_score": 0.5 + 0.02 * seed,
        "val_score": 0.6,
        "best_epoch": 2,
        "rate": 7.5,
        "raw_bytes": 3_000_000,
        "stored_bytes": 400_000,
        "average_bits": 4.3,
        "peak_bytes": 9_000_000,
        "epoch_seconds": 0.25,
        "train_seconds": 1.0,
        "measuring_seconds": 0.0,
        "passes": 0,
        "loss": [1.5, 1.25],
        "val_curve": [0.4, 0.6],
        "contexts": [
            {
                "slot": "convs.0/lin/linear.input",
                "role": "node",
                "codec": "quantize",
                "shape": [60, 3],
                "bits": 4,
                "sensitivity": None,
                "raw_bytes": 3_000_000,
                "stored_bytes": 400_000,
            }
        ],
        **changes,
    }


def config(**changes: Any) -> dict[str, Any]:
    """The part of a configuration that the texts look at."""
    return {
        "model": "gat",
        "dataset": "digits",
        "multi_label": False,
        "level": "L1",
        "bits": 4,
        "lr": 0.01,
        "device": "cpu",
        **changes,
    }


def results(*records: dict[str, Any], **changes: Any) -> dict[str, Any]:
    """Results of these records, of :func:`config`."""
    return {"config": config(**changes), "versions": {"torch": "2.13.0"}, "runs": [*records]}
