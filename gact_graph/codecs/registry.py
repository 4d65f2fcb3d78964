"""The registry of codecs, in the order in which they are asked."""

from __future__ import annotations

from gact_graph.codecs.base import Encoded
from gact_graph.codecs.codec import Codec, Request
from gact_graph.codecs.drop import Drop
from gact_graph.codecs.index import Index
from gact_graph.codecs.keep import Kept
from gact_graph.codecs.mask import Mask
from gact_graph.codecs.nonzero import NonzeroOnly
from gact_graph.codecs.quantize import Quantize
from gact_graph.codecs.rebuild import Rebuild
from gact_graph.codecs.round import Round
from gact_graph.codecs.slices import QuantizeBySlice

# Replaced, never changed in place: another thread may be iterating over it.
_codecs: tuple[Codec, ...] = (
    Drop(),
    Rebuild(),
    Mask(),
    Index(),
    Round(),
    QuantizeBySlice(),
    NonzeroOnly(),
    Quantize(),
)
_BUILT_IN = tuple(map(type, _codecs))


def registered() -> tuple[Codec, ...]:
    """Return the codecs in the order in which they are asked."""
    return _codecs


def register(codec: Codec, *, before: type[Codec] = Round) -> None:
    """Add a codec that every wrapped model asks from its next forward on.

    A codec encodes a tensor that autograd saves into a smaller form. Codecs are asked in order, and
    the first that does not return None stores the tensor; if all return None, the tensor is kept by
    reference. The built-in order is ``Drop``, ``Rebuild``, ``Mask``, ``Index``, ``Round``,
    ``QuantizeBySlice``, ``NonzeroOnly``, ``Quantize``. The default position is after the first
    four, which are lossless.

    This codec stores float32 tensors as bfloat16 if backward accepts inexact values:

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
        before: The class of the registered codec that is asked right after this codec, such as
            ``Drop`` to ask this codec first.

    Raises:
        TypeError: If ``codec`` is not an instance of a codec.
        ValueError: If ``codec`` is already registered, or no codec of class ``before`` is.
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
    """Remove a codec, which is not asked from the next forward on.

    Tensors that it has encoded can still be decoded.

    Args:
        codec: The registered instance; `gact_graph.codecs.registered()` returns all instances.

    Raises:
        ValueError: If ``codec`` is not registered.
    """
    global _codecs
    others = tuple(other for other in _codecs if other is not codec)
    if len(others) == len(_codecs):
        raise ValueError(
            f"Expected a registered codec (got {codec!r}); gact_graph.codecs.registered() has them"
        )
    _codecs = others


def asks_first(kind: type[Codec]) -> bool:
    """Return whether a codec of this class is asked before all codecs of the user."""
    kinds = [*map(type, _codecs)]
    return kind in kinds and all(k in _BUILT_IN for k in kinds[: kinds.index(kind)])


def encode(request: Request, lossless: bool, lossy: bool) -> Encoded:
    """Encode a tensor with the first codec that accepts it, or else keep a reference.

    Args:
        request: The tensor and its attributes.
        lossless: Whether lossless codecs are asked.
        lossy: Whether other codecs are asked.
    """
    for codec in _codecs:
        if lossless if codec.lossless else lossy:
            encoded = codec.encode(request)
            if encoded is not None:
                encoded.lossy |= not codec.lossless
                return encoded
    return Kept(request.tensor, request.slot)
