"""The codecs, in the order in which they are asked. A new one is a file here and a line below."""

from __future__ import annotations

from gact_graph.codecs.base import Codec, Context, Encoded, Request, Saved
from gact_graph.codecs.drop import Drop
from gact_graph.codecs.gather import Gather
from gact_graph.codecs.index import Index
from gact_graph.codecs.keep import Keep, Kept
from gact_graph.codecs.mask import Mask
from gact_graph.codecs.quantize import Quantize

__all__ = ["CODECS", "Codec", "Context", "Encoded", "Keep", "Kept", "Request", "Saved", "encode"]

CODECS: tuple[Codec, ...] = (Drop(), Gather(), Mask(), Index(), Quantize(), Keep())


def encode(request: Request, exact: bool, quantize: bool) -> Encoded:
    """The context as the first codec encodes it that has a form for it.

    Args:
        request: The context.
        exact: Whether the codecs that lose nothing are asked.
        quantize: Whether the others are.
    """
    for codec in CODECS[:-1]:
        if exact if codec.exact else quantize:
            encoded = codec.encode(request)
            if encoded is not None:
                return encoded
    return Kept(request.tensor, request.slot)
