"""In-place changes of a tensor that autograd's version counter cannot see.

NumPy may own the memory, and ``.data`` hides a change. Stock PyTorch seldom notices either, because
most operations save results of their own rather than the user's tensors. A layer that is computed
again, in blocks or as a whole, and a tensor that is gathered again read the user's tensors once
more, so a sample of their elements is compared.
"""

from __future__ import annotations

import torch
from torch import Tensor

from gact_graph.support.storage import is_plain, key_of, physical_of, storage_id

_ELEMENTS = 1024
"""The number of elements that are compared; most elements differ in another mini-batch."""


class Glimpse:
    """A copy of up to 1024 elements of a tensor in forward, evenly spread.

    Args:
        tensor: A plain tensor.
    """

    def __init__(self, tensor: Tensor) -> None:
        self._key = key_of(tensor)
        self._elements = _some(tensor)

    @property
    def nbytes(self) -> int:
        """The bytes of the copy."""
        return self._elements.nbytes

    def check(self, tensor: Tensor, use: str, way_out: str) -> None:
        """Compare the elements with those in backward; a decoded copy differs, and is skipped.

        Args:
            tensor: The tensor in backward.
            use: Its use there, for the message: a clause that follows the tensor's shape.
            way_out: The arguments of ``wrap`` that do without it.

        Raises:
            RuntimeError: An element differs.
        """
        if not is_plain(tensor) or storage_id(tensor) != self._key.cdata:
            return
        # As bytes, because NaN does not equal itself.
        if not torch.equal(_some(tensor).view(torch.uint8), self._elements.view(torch.uint8)):
            raise RuntimeError(
                "one of the variables needed for gradient computation has been modified: a tensor "
                f"of shape {tuple(tensor.shape)}, {use}, has other values than in forward. Change "
                f"it only after backward, pass a copy to the model, or take {way_out}."
            )


def glimpse_of(tensor: Tensor) -> Glimpse | None:
    """Return the glimpse of a tensor that code outside the model may hold; None for a result."""
    return Glimpse(tensor) if tensor.grad_fn is None and is_plain(tensor) else None


def _some(tensor: Tensor) -> Tensor:
    tensor = physical_of(tensor.detach())
    step = -(-max(1, tensor.numel()) // _ELEMENTS)
    if tensor.is_contiguous():
        return tensor.view(-1)[::step].clone()
    places = torch.arange(0, tensor.numel(), step, device=tensor.device)
    return tensor[torch.unravel_index(places, tensor.shape)]
