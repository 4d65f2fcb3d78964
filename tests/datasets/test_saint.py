"""The loader of the graphs of GraphSAINT, on small files of the raw format."""

import re

import pytest
import torch
from datasets_raw import cut_network, files_below, write_saint

from datasets import DatasetError, load

FOLDERS = {"flickr": "Flickr", "reddit": "Reddit2", "yelp": "Yelp"}


@pytest.mark.parametrize("name", FOLDERS)
def test_raw_files_and_then_the_cache(name, tmp_path):
    home = tmp_path / FOLDERS[name]
    expected = write_saint(home, multi_label=name == "yelp")
    raw_before = files_below(home / "raw")
    for _ in ("from raw", "from the cache"):
        graph = load(name, tmp_path)
        assert graph.name == name
        assert graph.num_classes == (2 if name == "yelp" else 3)
        assert graph.multi_label == (name == "yelp")
        for field, value in expected.items():
            assert getattr(graph, field).dtype == value.dtype
            assert torch.equal(getattr(graph, field), value), field
        assert (home / "processed/data.pt").is_file()
    assert files_below(home / "raw") == raw_before
    assert not list(tmp_path.glob(".partial*"))


@pytest.mark.parametrize("name", FOLDERS)
def test_without_files_or_network(name, tmp_path, monkeypatch):
    cut_network(monkeypatch)
    root = tmp_path / "not" / "there"
    with pytest.raises(DatasetError) as caught:
        load(name, root)
    words = str(caught.value)
    assert f"Expected the files of {name} in {root / FOLDERS[name]}" in words
    assert "got no raw/adj_full.npz, raw/feats.npy, raw/class_map.json, raw/role.json" in words
    assert "network is off" in words
    assert f"use FILE.npz, 'synthetic:{name}' or the bundled 'digits'" in words
    assert "\n" not in words
    assert not list(tmp_path.iterdir())


def test_content_that_is_no_graph(tmp_path):
    home = tmp_path / "Flickr"
    write_saint(home, multi_label=False)
    (home / "raw/role.json").write_text('{"tr": [], "va": [1], "te": [2]}')
    with pytest.raises(DatasetError, match=re.escape("Expected whole raw files of flickr in")):
        load("flickr", tmp_path)
    assert not (home / "processed").exists()
