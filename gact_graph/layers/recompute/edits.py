"""In-place changes of a tensor that autograd's version counter cannot see.

NumPy may own the memory, and ``.data`` hides a change. Stock PyTorch seldom notices either, because
most operations save results of their own rather than the user's tensors. A layer that is computed
again reads the user's tensors once more, so it compares a sample of their elements.
"""

from __future__ import annotations

import torch
from torch import Tensor

_ELEMENTS = 4096
"""The number of elements that are compared; most of them differ in another mini-batch."""


def glimpse(tensor: Tensor) -> Tensor:
    """Return a copy of up to 4096 elements of a tensor, evenly spread."""
    flat = tensor.detach().view(-1) if tensor.is_contiguous() else tensor.detach().flatten()
    return flat[:: -(-max(1, flat.numel()) // _ELEMENTS)].clone()


def check(before: Tensor, tensor: Tensor) -> None:
    """Compare a tensor with its earlier glimpse.

    Raises:
        RuntimeError: An element differs.
    """
    now = glimpse(tensor)
    # As bytes, because NaN does not equal itself.
    if not torch.equal(now.view(torch.uint8), before.view(torch.uint8)):
        raise RuntimeError(
            "one of the variables needed for gradient computation has been modified: an input of "
            f"shape {tuple(tensor.shape)} of a layer that is computed again in backward has other "
            "values than in forward. Change it only after backward, pass a copy to the model, or "
            "take a level that computes nothing again (level='L1', blocks=False)."
        )
