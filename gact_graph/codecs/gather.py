"""``gather``: the rows of another tensor, as that tensor and the index.

What a message-passing layer saves of its neighbours, ``x_j`` of E x C, is rows of a node tensor of
N x C. The node tensor is kept once, in whatever form its values allow, and backward gathers anew.
"""

from __future__ import annotations

from torch import Tensor

from gact_graph.codecs.base import Codec, Encoded, Request, Saved
from gact_graph.gathers import Gathered


class Regathered(Encoded):
    """The source and the index, both contexts of their own, and how they go together."""

    codec = "gather"
    nbytes = 0

    def __init__(self, source: Saved, gathered: Gathered) -> None:
        self.source = source
        self.index = gathered.index
        self.how = gathered.how
        self.exact = source.context.encoded.exact

    def decode(self) -> Tensor:
        return self.how.gather(self.source.tensor(), self.index.tensor()).view(-1)


class Gather(Codec):
    """Takes what was gathered from a tensor that is no larger."""

    def encode(self, request: Request) -> Regathered | None:
        gathered = request.gathered
        if gathered is None:
            return None
        return Regathered(request.keep(gathered.source), gathered)
