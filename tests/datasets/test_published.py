"""The published sizes of the data sets, against the documentation of PyG."""

import pytest

from datasets import NAMES
from datasets.published import PUBLISHED


def test_every_real_data_set_has_its_size():
    assert set(PUBLISHED) == set(NAMES) - {"digits"}


@pytest.mark.parametrize(
    ("name", "class_name"),
    [("flickr", "Flickr"), ("reddit", "Reddit2"), ("yelp", "Yelp"), ("cora", "Planetoid")],
)
def test_counts_are_those_in_the_documentation_of_pyg(name, class_name):
    datasets = pytest.importorskip("torch_geometric.datasets")
    documented = getattr(datasets, class_name).__doc__
    assert all(f"{count:,}" in documented for count in PUBLISHED[name][:4])
