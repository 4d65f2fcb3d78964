"""``gather``: gathered tensors, stored as their source and index.

A message-passing layer saves ``x_j`` [E, C], which it gathered from a node tensor [N, C]. The node
tensor is encoded once, by any codec, and backward gathers again.
"""

from __future__ import annotations

from torch import Tensor

from gact_graph.codecs.base import Codec, Encoded, Gathered, Request, Saved
from gact_graph.codecs.keep import Kept
from gact_graph.support.edits import Glimpse


class Regathered(Encoded):
    """The source and the index, both saved tensors, and the operation that gathers."""

    codec = "gather"

    def __init__(self, source: Saved, gathered: Gathered) -> None:
        self.source = source
        self.index = gathered.index
        self.operation = gathered.operation
        self.exact, reading = source.context.encoded.exact, source.context.reading
        self.lossy = reading is not None and reading.lossy
        source.context.gathered = True
        # Stock gathers once: a tensor that the user's code holds, too, may have changed since.
        source_may_change = gathered.source_is_leaf and _is_kept(source)
        self._source_glimpse = Glimpse(gathered.source) if source_may_change else None
        self._index_glimpse = Glimpse(self.index.tensor()) if _is_kept(self.index) else None

    @property
    def nbytes(self) -> int:
        glimpses = self._source_glimpse, self._index_glimpse
        return sum(glimpse.nbytes for glimpse in glimpses if glimpse is not None)

    def decode(self) -> Tensor:
        source, index = self.source.source(), self.index.tensor()
        for glimpse, tensor in (self._source_glimpse, source), (self._index_glimpse, index):
            if glimpse is not None:
                glimpse.check(tensor, "from which backward gathers again", "level='L0'")
        return self.operation.gather(source, index).view(-1)


def _is_kept(saved: Saved) -> bool:
    return isinstance(saved.context.encoded, Kept)


class Gather(Codec):
    """Encodes tensors that were gathered from a tensor that is no larger."""

    lossless = True

    def encode(self, request: Request) -> Regathered | None:
        gathered = request.gathered
        if gathered is None:
            return None
        return Regathered(request.keep(gathered.source), gathered)
