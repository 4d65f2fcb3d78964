from __future__ import annotations

from experiments_samples import record, results

from experiments.helpers.paper import VARIANTS, compare_notes, compared


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
