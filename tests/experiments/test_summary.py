"""Results over seeds: tables, titles and notes."""

from __future__ import annotations

from experiments_samples import config, record, results

from experiments.helpers import summary


def test_table_over_seeds() -> None:
    rows = dict(summary.table(results(record(0), record(1, epoch_seconds=0.75), record(2))).rows)
    assert rows == {
        "test accuracy, %": "52.00 ± 2.00",
        "validation accuracy, %": "60.00 ± 0.00",
        "compression rate": "7.5x",
        "saved for backward, raw": "3.0 MB",
        "saved for backward, stored": "400.0 kB",
        "peak memory": "9.0 MB",
        "seconds an epoch": "0.250",
        "seeds": "0, 1, 2",
    }


def test_multi_label_scores_are_micro_f1() -> None:
    assert summary.table(results(record(0), multi_label=True)).rows[0][0] == "test micro-F1, %"


def test_one_seed_has_no_spread() -> None:
    assert summary.percent([0.5]) == "50.00"


def test_unknown_values_are_left_out() -> None:
    rows = dict(summary.table(results(record(0, peak_bytes=None), record(1, peak_bytes=2000))).rows)
    assert rows["peak memory"] == "2.0 kB"
    none = dict(summary.table(results(record(0, peak_bytes=None, rate=None))).rows)
    assert (none["peak memory"], none["compression rate"]) == ("-", "-")


def test_what_measuring_took_is_told_where_anything_was_measured() -> None:
    measured = {"passes": 6, "train_seconds": 50.0}
    runs = (record(0, **measured, measuring_seconds=0.25), record(1, **measured), record(2))
    assert dict(summary.table(results(*runs)).rows)["of it measuring bits"] == "0.2%"
    unknown = record(0, **measured, measuring_seconds=None)
    assert "of it measuring bits" not in dict(summary.table(results(unknown)).rows)


def test_title() -> None:
    assert summary.title(config()) == "GAT on digits, 4 bit (L1)"
    fp32 = config(model="gcn", dataset="/long/way/cora.npz", bits=32, level="L0")
    assert summary.title(fp32) == "GCN on cora.npz, fp32 (L0)"


def noted(**changes: str) -> str:
    return " ".join(summary.notes(config(**changes)))


def test_files_with_features_of_another_origin() -> None:
    assert "features of this file are not OGB's" in noted(dataset="/x/arxiv_graph.npz")
    assert "features of this file are not Flickr's" in noted(dataset="/x/flickr_graph.npz")
    assert "features" not in noted(dataset="ogbn-arxiv") + noted(dataset="/x/cora.npz")


def test_graphs_without_published_scores() -> None:
    assert "not a published benchmark" in noted(dataset="digits")
    assert "is synthetic" in noted(dataset="synthetic:reddit@0.1")


def test_how_the_peak_was_taken() -> None:
    assert "resident set over its value at the start" in noted(device="cpu")
    assert "allocator's maximum" in noted(device="cuda")
