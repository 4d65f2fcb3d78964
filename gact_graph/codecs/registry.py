"""The codecs in the order in which they are asked; a user adds one with :func:`register`."""

from __future__ import annotations

from gact_graph.codecs.base import Codec, Encoded, Request
from gact_graph.codecs.drop import Drop
from gact_graph.codecs.gather import Gather
from gact_graph.codecs.index import Index
from gact_graph.codecs.keep import Kept
from gact_graph.codecs.mask import Mask
from gact_graph.codecs.quantize import Quantize
from gact_graph.codecs.round import Round
from gact_graph.codecs.slices import QuantizeBySlice

# Replaced as a whole, never changed: another thread may be going through it.
_codecs: tuple[Codec, ...] = (
    Drop(),
    Gather(),
    Mask(),
    Index(),
    Round(),
    QuantizeBySlice(),
    Quantize(),
)


def registered() -> tuple[Codec, ...]:
    """The codecs, in the order in which they are asked."""
    return _codecs


def register(codec: Codec, *, before: type[Codec] = Round) -> None:
    """Adds a codec: from the next forward on, every wrapped model asks it too.

    A codec takes a tensor that autograd saves and keeps it in a smaller form. The codecs are asked
    one after another, and the first that does not answer None keeps the tensor; where all answer
    None, the tensor is kept as it is. The built-in order is ``Drop``, ``Gather``, ``Mask``,
    ``Index``, ``Round``, ``QuantizeBySlice``, ``Quantize``. The default place is behind the four
    that lose nothing backward needs, and before the three that lose precision.

    This codec keeps float32 tensors as bfloat16 where backward is content with inexact values:

    ```python
    import torch
    from gact_graph.codecs import Codec, Encoded, Request, Values, register

    class Short(Encoded):
        codec = "bfloat16"  # the name that gact_graph.report(model) shows

        def __init__(self, x: torch.Tensor) -> None:
            self.short = x.to(torch.bfloat16)

        @property
        def nbytes(self) -> int:
            return self.short.nbytes

        def decode(self) -> torch.Tensor:
            return self.short.to(torch.float32)

    class ToBfloat16(Codec):
        def encode(self, request: Request) -> Short | None:
            x = request.tensor
            inexact = isinstance(request.reads, Values) and request.bits < 32
            return Short(x) if x.dtype == torch.float32 and inexact else None

    register(ToBfloat16())
    ```

    Args:
        codec: An instance of a subclass of `gact_graph.codecs.Codec`.
        before: The class of the registered codec that is to be asked right after this one, such as
            ``Drop`` for a codec that is to be asked first of all.

    Raises:
        TypeError: ``codec`` is no instance of a codec.
        ValueError: ``codec`` is registered already, or no codec of the class ``before`` is.
    """
    global _codecs
    if not isinstance(codec, Codec):
        got = codec.__name__ if isinstance(codec, type) else type(codec).__name__
        raise TypeError(
            f"Expected an instance of a gact_graph.codecs.Codec (got {got}); "
            "write register(MyCodec()), where MyCodec is a subclass of Codec"
        )
    if any(other is codec for other in _codecs):
        raise ValueError(
            f"Expected a codec that is not registered (got this {type(codec).__name__} again); "
            "call unregister on it first"
        )
    place = next((i for i, other in enumerate(_codecs) if type(other) is before), None)
    if place is None:
        names = ", ".join(type(other).__name__ for other in _codecs)
        raise ValueError(
            f"Expected before to be the class of a registered codec: one of {names} (got {before})"
        )
    _codecs = (*_codecs[:place], codec, *_codecs[place:])


def unregister(codec: Codec) -> None:
    """Removes a codec: from the next forward on it is not asked.

    What it has encoded can still be decoded.

    Args:
        codec: The instance that was registered, or one of `gact_graph.codecs.registered()`.

    Raises:
        ValueError: ``codec`` is not registered.
    """
    global _codecs
    others = tuple(other for other in _codecs if other is not codec)
    if len(others) == len(_codecs):
        raise ValueError(
            f"Expected a registered codec (got {codec!r}); gact_graph.codecs.registered() has them"
        )
    _codecs = others


def encode(request: Request, lossless: bool, lossy: bool) -> Encoded:
    """The tensor in the form of the first codec that takes it, else a reference to it.

    Args:
        request: The tensor and what is known of it.
        lossless: Whether codecs are asked with which gradients stay bit-identical.
        lossy: Whether the others are.
    """
    for codec in _codecs:
        if lossless if codec.lossless else lossy:
            encoded = codec.encode(request)
            if encoded is not None:
                encoded.lossy |= not codec.lossless
                return encoded
    return Kept(request.tensor, request.slot)
