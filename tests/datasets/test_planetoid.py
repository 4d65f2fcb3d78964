"""The loader of Planetoid's graphs, on small files of the raw format."""

import pytest
import torch
from datasets_raw import cut_network, write_planetoid

from datasets import DatasetError, load

FOLDERS = {"cora": "Cora", "citeseer": "CiteSeer", "pubmed": "PubMed"}


def sorted_edges(edge_index):
    return sorted(map(tuple, edge_index.t().tolist()))


@pytest.mark.parametrize("name", FOLDERS)
def test_raw_files_and_then_the_cache(name, tmp_path):
    expected = write_planetoid(tmp_path / FOLDERS[name], name)
    edges = sorted_edges(expected.pop("edge_index"))
    for _ in ("from raw", "from the cache"):
        graph = load(name, tmp_path)
        assert (graph.name, graph.num_classes) == (name, 3)
        for field, value in expected.items():
            assert torch.equal(getattr(graph, field), value), field
        assert sorted_edges(graph.edge_index) == edges
        assert (tmp_path / FOLDERS[name] / "processed/data.pt").is_file()


def test_without_files_or_network(tmp_path, monkeypatch):
    cut_network(monkeypatch)
    with pytest.raises(DatasetError, match=r"got no raw/ind\.cora\.x, raw/ind\.cora\.tx") as caught:
        load("cora", tmp_path)
    assert f"Expected the files of cora in {tmp_path / 'Cora'}" in str(caught.value)
    assert "'synthetic:cora'" in str(caught.value)
    assert not list(tmp_path.iterdir())
