"""``gather``: gathered tensors, stored as their source and index.

A message-passing layer saves ``x_j`` [E, C], which it gathered from a node tensor [N, C]. The node
tensor is encoded once, by any codec, and backward gathers again.
"""

from __future__ import annotations

from torch import Tensor

from gact_graph.codecs.base import Codec, Encoded, Gathered, Request, Saved


class Regathered(Encoded):
    """The source and the index, both saved tensors, and the operation that gathers."""

    codec = "gather"
    nbytes = 0

    def __init__(self, source: Saved, gathered: Gathered) -> None:
        self.source = source
        self.index = gathered.index
        self.operation = gathered.operation
        self.exact, reading = source.context.encoded.exact, source.context.reading
        self.lossy = reading is not None and reading.lossy
        source.context.gathered = True

    def decode(self) -> Tensor:
        return self.operation.gather(self.source.source(), self.index.tensor()).view(-1)


class Gather(Codec):
    """Encodes tensors that were gathered from a tensor that is no larger."""

    lossless = True

    def encode(self, request: Request) -> Regathered | None:
        gathered = request.gathered
        if gathered is None:
            return None
        return Regathered(request.keep(gathered.source), gathered)
