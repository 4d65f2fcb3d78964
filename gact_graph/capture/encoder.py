"""How the contexts of one forward are encoded: bits, noise, a second width, host memory."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Protocol

from torch import Tensor

from gact_graph.capture.config import Config
from gact_graph.capture.elements import Elements
from gact_graph.capture.noise import Noise
from gact_graph.capture.trace import Saver
from gact_graph.codecs import Context, Encoded, Request, Saved, encode
from gact_graph.codecs.base import Gathered
from gact_graph.codecs.compared import Widths, in_two_widths
from gact_graph.codecs.offload.swap import Swap
from gact_graph.codecs.reads import Reads
from gact_graph.layers.recompute.contexts import BITS
from gact_graph.support.current import Coding


class Bits(Protocol):
    """Bits by slot; :class:`gact_graph.adaptive.scheme.Scheme` decides them."""

    def bits_of(self, slot: str) -> int: ...

    def keeps(self, slot: str) -> bool: ...


class Encoder:
    """Encodes with the settings of one forward.

    Args:
        config: The model's settings.
        scheme: Bits by slot.
        noise: Seeds by slot.
        swap: Moves encoded contexts to host memory; None leaves them on their device.
        widths: Has each quantized context in a finer width, too, and tells which one is decoded;
            None outside measurements.
    """

    def __init__(
        self,
        config: Config,
        scheme: Bits,
        noise: Noise,
        swap: Swap | None = None,
        widths: Widths | None = None,
    ) -> None:
        self._config = config
        self._scheme = scheme
        self._noise = noise
        self._swap = swap
        self._widths = widths

    def request(
        self,
        saver: Saver,
        reads: Reads,
        elements: Elements,
        gathered: Gathered | None,
        keep: Callable[[Tensor], Saved],
        exactly: bool,
    ) -> Request:
        """What the codecs are asked; see :class:`gact_graph.codecs.Request`."""
        # A loss that is written by hand is exact, as PyTorch's own are.
        quantize = self._config.quantize and not saver.call.of_loss and not exactly
        return Request(
            tensor=elements.flat,
            slot=saver.slot,
            operation=saver.call.name,
            reads=reads,
            gathered=gathered,
            keep=keep,
            bits=self._scheme.bits_of(saver.slot) if quantize else 32,
            group_size=self._config.group_size,
            seed=self._noise.seed_of(saver.slot),
        )

    def encode(self, request: Request) -> Encoded:
        """The tensor in the form of the first codec that takes it."""
        return encode(request, self._config.exact, self._config.quantize and request.bits < 32)

    def context(self, request: Request, encoded: Encoded) -> Context:
        """A context of the encoded form: in two widths, where a measurement asks for them."""
        if self._widths is not None:
            compared = in_two_widths(request, encoded, self.encode, self._widths)
            if compared is not None:
                return compared
        return Context(encoded)

    def offload(self, context: Context) -> None:
        """Moves the encoded form to host memory, where that was asked for."""
        if self._swap is not None:
            context.move(self._swap.leave)

    def coding_of(self, module: str) -> Coding | None:
        """How a layer that runs again in backward quantizes what its blocks read."""
        if not self._config.quantize:
            return None
        bits = max(BITS, math.ceil(self._config.bits))
        return Coding(bits, self._config.group_size, self._noise.seed_of(f"{module}/again"))

    def close(self) -> None:
        """Ends what goes on beside the forward."""
        if self._swap is not None:
            self._swap.close()
