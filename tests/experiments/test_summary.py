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
