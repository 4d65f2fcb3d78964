from __future__ import annotations

import pytest

from experiments.helpers.paper import paper_rates, paper_score


@pytest.mark.parametrize(
    ("model", "dataset", "scores"),
    [
        ("gcn", "flickr", (51.17, 51.08, 51.20)),
        ("gat", "ogbn-arxiv", (71.68, 71.80, 71.21)),
        ("gcnii", "yelp", (62.33, 62.28, 62.33)),
    ],
)
def test_scores(model: str, dataset: str, scores: tuple[float, float, float]) -> None:
    variants = ("fp32", "adaptive-4", "adaptive-2")
    assert tuple(paper_score(model, dataset, variant) for variant in variants) == scores
    assert paper_score(model, dataset, "adaptive-3") is None
    assert paper_score(model, dataset, "fixed-4") is None


def test_scores_are_for_the_data_sets_themselves() -> None:
    for dataset in ("arxiv_graph.npz", "flickr_graph.npz", "synthetic:reddit", "digits"):
        assert paper_score("gcn", dataset, "fp32") is None


def test_rates() -> None:
    assert paper_rates("gcn", "adaptive-2") == (9.0, 17.6)
    assert paper_rates("gat", "adaptive-4") == (4.2, 5.1)
    assert paper_rates("gcnii", "adaptive-3") == (5.2, 8.0)
    assert paper_rates("gcn", "fp32") is None
