"""Curves of a run as a picture."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from experiments_samples import record, results

from experiments.helpers.errors import ExperimentError
from experiments.helpers.plot import plot_curves, require_matplotlib


def test_draws_a_picture_even_of_nan(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    found = results(record(0), record(1, loss=[1.0, None], val_curve=[None, 0.5]))
    plot_curves(found, tmp_path)
    picture = (tmp_path / "curves.png").read_bytes()
    assert picture.startswith(b"\x89PNG")
    assert [path.name for path in tmp_path.iterdir()] == ["curves.png"]
    plot_curves(results(record(0)), tmp_path)
    assert (tmp_path / "curves.png").read_bytes() != picture


def test_missing_matplotlib_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(ExperimentError, match=r'pip install "gact_graph\[experiments\]"'):
        require_matplotlib()
