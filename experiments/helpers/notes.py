"""Remarks on a run's numbers, printed wherever they are shown."""

from __future__ import annotations

from typing import Any

from experiments.helpers.recipes import base_name, has_foreign_features

_EPOCH = "Seconds an epoch: the median training step, without evaluation."


def notes(config: dict[str, Any]) -> list[str]:
    """Return the notes that apply to a run, one sentence or two each."""
    lines = []
    dataset = config["dataset"]
    if has_foreign_features(dataset):
        source = {"ogbn-arxiv": "OGB's", "flickr": "Flickr's"}[base_name(dataset)]
        lines.append(
            f"The features of this file are not {source}: scores compare a run with a run, not "
            "with published ones."
        )
    elif dataset == "digits":
        lines.append("The digits graph is of our own making: no published scores exist for it.")
    elif dataset.startswith("synthetic:"):
        lines.append("The graph is made up: memory and time are telling, scores are not.")
    if config["device"] == "cpu":
        lines.append(
            "Peak memory on CPU: the resident set over its value at the start of a seed, which on "
            "a small graph is mostly libraries warming up."
        )
    else:
        lines.append("Peak memory on CUDA: the allocator's maximum, graph and weights included.")
    if config.get("partition") is not None:
        lines.append("Bytes, rates and peak are those of the first process and its part.")
    lines.append(_EPOCH)
    return lines
