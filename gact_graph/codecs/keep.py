"""``keep``: the tensor itself, by reference, with a check for in-place changes."""

from __future__ import annotations

from collections.abc import Hashable

import torch
from torch import Tensor

from gact_graph.codecs.base import Encoded
from gact_graph.support.content import mark_of, same
from gact_graph.support.storage import is_plain, parts_of, version_of


class Kept(Encoded):
    """A reference to a tensor, and its version."""

    codec = "keep"
    exact = True

    def __init__(self, tensor: Tensor, slot: str) -> None:
        # detach() would turn a subclass (PyG's EdgeIndex) into a plain tensor.
        self.tensor: Tensor = tensor.detach() if tensor.requires_grad else tensor
        self.version: int | None = version_of(tensor)
        self.slot = slot

    @property
    def nbytes(self) -> int:
        return sum(part.untyped_storage().nbytes() for part in parts_of(self.tensor))

    def decode(self) -> Tensor:
        # Autograd checks the version of tensors that it saves itself, but not of those that pass
        # through hooks: without a check, an in-place change would silently give a wrong gradient.
        now = version_of(self.tensor)
        if now != self.version:
            kind, shape = self.tensor.type(), list(self.tensor.shape)
            raise RuntimeError(
                "one of the variables needed for gradient computation has been modified by an "
                f"inplace operation: [{kind} {shape}], saved at {self.slot}, is at version {now}; "
                f"expected version {self.version} instead. Change it out of place, or after "
                "backward."
            )
        return self.tensor

    def fingerprint(self) -> Hashable:
        x = self.tensor
        if not is_plain(x) or x.is_meta or x.dtype == torch.complex32:  # which have no comparison
            return None
        kind = self.codec, self.tensor.dtype, self.tensor.shape, self.tensor.device
        return *kind, *mark_of(self.tensor).tolist()

    def equals(self, other: Encoded) -> bool:
        if not isinstance(other, Kept) or version_of(other.tensor) != other.version:
            return False
        return same(self.tensor, other.tensor)
