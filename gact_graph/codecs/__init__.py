"""Codecs: the forms in which saved tensors are stored until backward.

Here: one file for each codec, their registry, the descriptions of what backward reads of a saved
tensor (:mod:`gact_graph.codecs.reads`), and ``offload``. Not here: which operation saved a tensor,
and how many bits it gets.

See :func:`register` for how to write a codec.
"""

from gact_graph.codecs.base import Context, Encoded, Saved
from gact_graph.codecs.codec import Codec, Request
from gact_graph.codecs.drop import Drop
from gact_graph.codecs.index import Index
from gact_graph.codecs.keep import Kept
from gact_graph.codecs.mask import Mask
from gact_graph.codecs.nonzero import NonzeroOnly
from gact_graph.codecs.quantize import Quantize
from gact_graph.codecs.reads import Exact, Nothing, Reads, Side, Sign, Values
from gact_graph.codecs.rebuild import Rebuild
from gact_graph.codecs.registry import encode, register, registered, unregister
from gact_graph.codecs.round import Round
from gact_graph.codecs.slices import QuantizeBySlice

__all__ = [
    "Codec",
    "Context",
    "Drop",
    "Encoded",
    "Exact",
    "Index",
    "Kept",
    "Mask",
    "NonzeroOnly",
    "Nothing",
    "Quantize",
    "QuantizeBySlice",
    "Reads",
    "Rebuild",
    "Request",
    "Round",
    "Saved",
    "Side",
    "Sign",
    "Values",
    "encode",
    "register",
    "registered",
    "unregister",
]
