"""The codecs, in the order in which they are asked. A new one is a file here and a line below."""

from __future__ import annotations

from gact_graph.codecs.base import Codec, Encoded, Request
from gact_graph.codecs.keep import Keep, Kept
from gact_graph.codecs.quantize import Quantize

__all__ = ["CODECS", "Codec", "Encoded", "Keep", "Kept", "Request", "codec_for"]

CODECS: tuple[Codec, ...] = (Quantize(), Keep())


def codec_for(request: Request) -> Codec:
    """The first codec that takes the context."""
    return next(codec for codec in CODECS if codec.accepts(request))
