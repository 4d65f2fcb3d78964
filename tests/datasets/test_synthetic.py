"""Synthetic graphs: sizes, communities and seeds."""

import re

import pytest
import torch

from datasets import DatasetError, load
from datasets.published import PUBLISHED, Size
from datasets.synthetic import FRACTION_INSIDE, block_model


def nearest_mean_accuracy(x, graph):
    train = graph.train_idx
    means = torch.zeros(graph.num_classes, x.size(1)).index_add_(0, graph.y[train], x[train])
    means /= graph.y[train].bincount(minlength=graph.num_classes).view(-1, 1)
    guess = torch.cdist(x[graph.test_idx], means).argmin(dim=1)
    return float((guess == graph.y[graph.test_idx]).float().mean())


@pytest.mark.parametrize("name", PUBLISHED)
def test_counts_are_the_published_ones_scaled(name):
    size = PUBLISHED[name]
    scale = 0.02 if size.nodes > 20_000 else 1.0
    graph = load(f"synthetic:{name}@{scale}")
    assert graph.name == f"synthetic:{name}@{scale}"
    assert graph.num_nodes == round(size.nodes * scale)
    assert graph.num_edges == round(size.edges * scale) // 2 * 2
    assert (graph.x.size(1), graph.num_classes) == (size.features, size.classes)
    assert graph.multi_label == size.multi_label


def test_scale_defaults_to_one():
    assert load("synthetic:cora").num_nodes == 2708


@pytest.mark.parametrize(
    "size", [Size(500, 4001, 3, 4), Size(12, 66, 1, 2), Size(233, 23214, 2, 41)]
)
def test_edges_go_both_ways_once_sorted_and_never_to_themselves(size):
    graph = block_model(size)
    source, target = graph.edge_index
    there, back = source * size.nodes + target, target * size.nodes + source
    assert graph.num_edges == size.edges // 2 * 2
    assert (source != target).all()
    assert torch.equal(there, there.unique())
    assert torch.equal(there, back.sort().values)


def test_communities_are_even_and_edges_keep_to_them():
    graph = block_model(Size(4000, 60_000, 3, 7))
    counts = graph.y.bincount()
    source, target = graph.edge_index
    assert counts.max() - counts.min() <= 1
    assert graph.y[graph.train_idx].bincount(minlength=7).min() > 0.5 * 4000 / 7
    inside = (graph.y[source] == graph.y[target]).float().mean()
    assert float(inside) == pytest.approx(FRACTION_INSIDE, abs=1e-3)


def test_nodes_of_a_community_are_not_in_a_row():
    y = block_model(Size(4000, 8000, 3, 4)).y
    assert 0.2 < float((y[1:] == y[:-1]).float().mean()) < 0.3


def test_seed_decides_and_global_state_stays():
    size = Size(300, 2000, 5, 3)
    before = torch.get_rng_state()
    first, again, other = block_model(size), block_model(size), block_model(size, seed=1)
    for field in ("x", "edge_index", "y", "train_idx"):
        assert torch.equal(getattr(first, field), getattr(again, field))
        assert not torch.equal(getattr(first, field), getattr(other, field))
    assert torch.equal(torch.get_rng_state(), before)


def test_neighbors_tell_more_than_features_alone():
    graph = load("synthetic:ogbn-arxiv@0.05")
    source, target = graph.edge_index
    smooth = graph.x.clone().index_add_(0, target, graph.x[source])
    degree = 1 + target.bincount(minlength=graph.num_nodes).view(-1, 1)
    alone = nearest_mean_accuracy(graph.x, graph)
    together = nearest_mean_accuracy(smooth / degree, graph)
    assert 2 / graph.num_classes < alone < together - 0.2


def test_multi_label_targets_hold_several_of_the_labels_of_a_community():
    graph = load("synthetic:yelp@0.01")
    per_node = graph.y.sum(dim=1)
    assert graph.y.dtype == torch.float32 and graph.y.shape == (graph.num_nodes, 100)
    assert 3 < per_node.mean() < 15
    assert (graph.y.sum(dim=0) > 0).all()
    source, target = graph.edge_index
    shared = (graph.y[source] * graph.y[target]).sum(dim=1).mean()
    strangers = (graph.y * graph.y.roll(1, dims=0)).sum(dim=1).mean()
    assert shared > 2 * strangers


@pytest.mark.parametrize(
    ("spec", "words"),
    [
        (
            "synthetic:nobody",
            "NAME one of ogbn-arxiv, flickr, reddit, yelp, cora, citeseer, pubmed",
        ),
        ("synthetic:", "(got 'synthetic:')"),
        ("synthetic:cora@", "Expected a positive number after '@' in 'synthetic:cora@' (got '')"),
        ("synthetic:cora@much", "(got 'much'); 'synthetic:reddit@0.1' is a tenth of Reddit"),
        ("synthetic:cora@-1", "Expected a positive number after '@'"),
        ("synthetic:cora@nan", "Expected a positive number after '@'"),
        ("synthetic:cora@inf", "Expected a positive number after '@'"),
        (
            "synthetic:reddit@1e-5",
            "two nodes for each of its 41 classes (got 2 nodes); use a larger",
        ),
        ("synthetic:reddit@0.0005", "at most half of its node pairs (got"),
    ],
)
def test_refusals(spec, words):
    with pytest.raises(DatasetError, match=re.escape(words)):
        load(spec)


def test_one_community_is_refused():
    with pytest.raises(DatasetError, match=r"at least two classes \(got 1\)"):
        block_model(Size(10, 4, 2, 1))


@pytest.mark.parametrize(
    ("scale", "words"),
    [
        ("1e9", "to fit into the .* of memory that are free .*; use a smaller scale"),
        ("1e300", "to fit into the .* of memory that are free .*; use a smaller scale"),
        ("1e308", "Expected a scale that leaves numbers finite"),
    ],
)
def test_a_graph_larger_than_memory_is_refused_before_it_is_made(scale, words):
    with pytest.raises(DatasetError, match=words):
        load(f"synthetic:cora@{scale}")
