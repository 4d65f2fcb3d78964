"""The numbers of the GACT paper, and the table that sets them beside measured ones."""

from __future__ import annotations

import pytest
from experiments_samples import record, results

from experiments.helpers.paper import (
    VARIANTS,
    compare_notes,
    compared,
    paper_rates,
    paper_score,
)


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


def test_variants_are_the_papers() -> None:
    found = [(variant.name, variant.bits, variant.adaptive) for variant in VARIANTS]
    assert found == [
        ("fp32", 32, False),
        ("fixed-4", 4, False),
        ("adaptive-4", 4, True),
        ("adaptive-3", 3, True),
        ("adaptive-2", 2, True),
    ]


def test_rows_set_the_paper_beside_ours() -> None:
    found = {
        "fp32": results(record(0), record(1)),
        "fixed-4": results(record(0, rate=4.25, stored_bytes=100)),
    }
    head, rows = compared("gat", "flickr", found)
    assert all(len(row) == len(head) for row in rows)
    assert rows == [
        ("fp32", "51.00 ± 1.41", "52.40", "7.5x", "-", "400.0 kB", "9.0 MB", "0.250"),
        ("fixed 4 bit", "50.00", "-", "4.2x", "-", "100 B", "9.0 MB", "0.250"),
        ("adaptive 4 bit", "not yet", "52.26", "not yet", "4.2-5.1x", "", "", ""),
        ("adaptive 3 bit", "not yet", "-", "not yet", "4.5-6.1x", "", "", ""),
        ("adaptive 2 bit", "not yet", "51.62", "not yet", "5.2-7.0x", "", "", ""),
    ]


def test_notes_say_where_the_paper_has_no_row() -> None:
    assert not any("no scores" in line for line in compare_notes("gat", "flickr"))
    assert any("no scores" in line for line in compare_notes("gat", "flickr_graph.npz"))
