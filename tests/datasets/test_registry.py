"""The loaders by name, and the folders in which they keep files."""

import re

import pytest

import datasets
from datasets import NAMES, DatasetError, load


def test_names_are_the_promised_ones():
    assert NAMES == (
        "digits",
        "ogbn-arxiv",
        "flickr",
        "reddit",
        "yelp",
        "cora",
        "citeseer",
        "pubmed",
    )
    assert set(datasets.__all__) == {"NAMES", "DatasetError", "Graph", "load"}


@pytest.mark.parametrize("spec", ["", "nobody", "Cora", "cora.pt", "synthetic"])
def test_unknown_name_lists_the_known_ones(spec):
    words = (
        f"Expected one of {', '.join(NAMES)}, a path FILE.npz, 'synthetic:NAME' or "
        f"'synthetic:NAME@SCALE' (got {spec!r})"
    )
    with pytest.raises(DatasetError, match=f"^{re.escape(words)}$"):
        load(spec)


def test_bundled_and_made_up_graphs_touch_no_folder(tmp_path):
    load("digits", tmp_path / "data")
    load("synthetic:cora", tmp_path / "data")
    assert not list(tmp_path.iterdir())


def test_relative_root_and_home_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setattr("datasets.registry.LOADERS", {"digits": lambda root: root})
    assert load("digits") == tmp_path / "data"
    assert load("digits", "~/graphs") == tmp_path / "home/graphs"
