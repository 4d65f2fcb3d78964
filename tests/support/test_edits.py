"""The sample of a tensor that is compared in backward."""

from __future__ import annotations

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from gact_graph.support.edits import Glimpse
from gact_graph.support.storage import storage_id

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


class Largest(TorchDispatchMode):
    """Records the most elements of a result that is no view of the first argument."""

    def __init__(self):
        super().__init__()
        self.numel = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **kwargs or {})
        if isinstance(result, torch.Tensor) and not self._is_view(result, *args):
            self.numel = max(self.numel, result.numel())
        return result

    def _is_view(self, result, of=None, *_):
        return isinstance(of, torch.Tensor) and storage_id(result) == storage_id(of)


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
