"""The sample of a tensor that is compared in backward."""

from __future__ import annotations

import pytest
import torch
from seen import Largest

from gact_graph.support.edits import Glimpse

X = torch.randn(64, 500)

FORMS = {
    "contiguous": X,
    "transposed": X.t(),
    "columns": X[:, 1::3],
    "expanded": X[:1].expand(4000, 500),
    "conjugate": torch.complex(X, X).conj().t(),
    "bool": (X > 0).t(),
    "scalar": torch.tensor(3.0),
    "empty": X[:0].t(),
    "row": X[3:4, 7:8],
}


@pytest.mark.parametrize("name", FORMS)
def test_copies_a_sample_of_the_elements_and_no_more(name):
    tensor = FORMS[name]
    with Largest() as largest:
        glimpse = Glimpse(tensor)
    assert largest.numel <= 1024 * max(1, tensor.dim())  # the indices of the elements
    assert glimpse.nbytes <= 1024 * tensor.element_size()
    glimpse.check(tensor, "an input", "level='L0'")


@pytest.mark.parametrize("name", [name for name in FORMS if name != "empty"])
def test_a_change_is_an_error(name):
    tensor = FORMS[name].clone(memory_format=torch.preserve_format)
    glimpse = Glimpse(tensor)
    tensor.data.logical_not_() if tensor.dtype == torch.bool else tensor.data.add_(1)
    with pytest.raises(RuntimeError, match="has other values than in forward"):
        glimpse.check(tensor, "an input", "level='L0'")


@pytest.mark.parametrize("part", [0, 3, 7])
@pytest.mark.parametrize(
    "view", [torch.clone, torch.t, lambda x: x[:, 1::3]], ids=["contiguous", "transposed", "gaps"]
)
def test_a_change_of_any_eighth_is_an_error(view, part):
    tensor = view(X.clone())
    glimpse = Glimpse(tensor)
    tensor.data.chunk(8)[part].add_(1)
    with pytest.raises(RuntimeError, match="has other values than in forward"):
        glimpse.check(tensor, "an input", "level='L0'")
