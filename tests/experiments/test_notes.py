from __future__ import annotations

from experiments_samples import config

from experiments.helpers.summary import notes


def text(**changes: str) -> str:
    return " ".join(notes(config(**changes)))


def test_files_with_features_of_another_origin() -> None:
    assert "features of this file are not OGB's" in text(dataset="/x/arxiv_graph.npz")
    assert "features of this file are not Flickr's" in text(dataset="/x/flickr_graph.npz")
    assert "features" not in text(dataset="ogbn-arxiv") + text(dataset="/x/cora.npz")


def test_graphs_without_published_scores() -> None:
    assert "of our own making" in text(dataset="digits")
    assert "is synthetic" in text(dataset="synthetic:reddit@0.1")


def test_how_the_peak_was_taken() -> None:
    assert "resident set over its value at the start" in text(device="cpu")
    assert "allocator's maximum" in text(device="cuda")
