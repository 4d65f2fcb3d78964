"""The loader of ogbn-arxiv, on small files of the raw format."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from datasets_raw import cut_network, write_arxiv

from datasets import DatasetError, load

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize("folder", ["ogbn_arxiv", "ogbn_arxiv_pyg"])
def test_raw_files_and_then_the_cache(folder, tmp_path, capsys):
    expected = write_arxiv(tmp_path / folder)
    for _ in ("from raw", "from the cache"):
        graph = load("ogbn-arxiv", tmp_path)
        assert (graph.name, graph.num_classes, graph.multi_label) == ("ogbn-arxiv", 40, False)
        for field, value in expected.items():
            assert getattr(graph, field).dtype == value.dtype
            assert torch.equal(getattr(graph, field), value), field
        assert (tmp_path / folder / "processed/geometric_data_processed.pt").is_file()
    assert capsys.readouterr().out == ""
    assert [path.name for path in tmp_path.iterdir()] == [folder]


def test_cache_with_a_class_that_is_not_allowed_is_refused(tmp_path):
    write_arxiv(tmp_path / "ogbn_arxiv")
    cache = tmp_path / "ogbn_arxiv/processed/geometric_data_processed.pt"
    cache.parent.mkdir()
    torch.save((Path("anything"), None), cache)
    with pytest.raises(DatasetError, match="Expected a readable cache of ogbn-arxiv") as caught:
        load("ogbn-arxiv", tmp_path)
    assert f"delete {cache} to have it made again" in str(caught.value)
    assert cache.is_file()


def test_without_files_or_network(tmp_path, monkeypatch):
    cut_network(monkeypatch)
    with pytest.raises(DatasetError, match=r"raw/edge\.csv\.gz") as caught:
        load("ogbn-arxiv", tmp_path)
    assert f"Expected the files of ogbn-arxiv in {tmp_path / 'ogbn_arxiv'}" in str(caught.value)
    assert "network is off" in str(caught.value)
    assert not list(tmp_path.iterdir())


def test_missing_release_note_asks_no_question(tmp_path, monkeypatch):
    cut_network(monkeypatch)
    monkeypatch.setattr("builtins.input", lambda *_: pytest.fail("asked a question"))
    home = tmp_path / "ogbn_arxiv"
    write_arxiv(home)
    (home / "RELEASE_v1.txt").unlink()
    with pytest.raises(DatasetError, match=r"got no RELEASE_v1\.txt\)"):
        load("ogbn-arxiv", tmp_path)
    assert (home / "raw/edge.csv.gz").is_file()


def test_nothing_is_imported_early_and_no_update_is_looked_for(tmp_path):
    write_arxiv(tmp_path / "ogbn_arxiv")
    script = f"""
import sys, threading, torch
import datasets
assert not {{"ogb", "sklearn", "torch_geometric.datasets"}} & set(sys.modules), "early import"
datasets.load("ogbn-arxiv", {str(tmp_path)!r})
assert "ogb" in sys.modules
assert "outdated" not in sys.modules, "OGB asked for its newest version"
assert all(thread.daemon for thread in threading.enumerate()[1:]), "a thread holds up the exit"
from torch_geometric.data import Data
from torch_geometric.data.storage import GlobalStorage
allowed = torch.serialization.get_safe_globals()
assert Data in allowed and GlobalStorage not in allowed, "allowed pickles are not as PyG left them"
"""
    # A new process, for what is imported once stays; without stdin, for a question would wait.
    done = subprocess.run(
        [sys.executable, "-c", script],
        cwd=ROOT,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == ""
