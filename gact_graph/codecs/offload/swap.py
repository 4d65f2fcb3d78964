"""Level ``L2``: encoded contexts leave for host memory in forward and come back in backward.

The order of things on a device, by events alone; the host waits for none of it (only to pin a
buffer for the first time):

- The offload stream waits for the stream that encoded the context, and for the last copy that read
  the host buffer. Then it copies.
- The prefetch stream waits for the copy to the host, and for the computing stream, since that one
  gives the memory for the copy back and may still use it. Then it copies.
- The stream that decodes waits for that copy.
- Memory of the device that a side stream used is let go after the stream that gave it has been told
  to wait for the side stream. The allocator then reuses it in the order of that stream. With
  ``record_stream`` instead it would have to see the copy done first, and as the host runs ahead of
  the device, all contexts would be there at once after all. ``record_stream`` serves where waiting
  would cost more (the end of forward) or another stream computes than at the start.
"""

from __future__ import annotations

import threading
import weakref
from collections import deque
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from gact_graph.codecs import Encoded
from gact_graph.codecs.offload.pinned import Buffer, Pool, room_for
from gact_graph.codecs.offload.streams import OFFLOAD, PREFETCH, Streams

LEAST_BYTES = 2**20
"""A context whose encoded form is smaller stays: over PCIe its copy takes some 40 us, no more than
the host needs to ask for the copies and events."""

# Bytes that may be leaving a device before its computing stream has to wait for the first of them:
# a few milliseconds of copying, to even out operations that save more and such that save less.
_LEAVING_BYTES = 64 * 2**20

# Contexts that may be on their way back at once, and their bytes where there are several: the bus
# does not rest between small ones, and large ones do not fill the device.
_COMING = 3
_COMING_BYTES = 64 * 2**20

# What is on its way back is given up once this many other contexts were read in its place.
_PATIENCE = 4


class Swapping:
    """What the forwards of one wrapped model share.

    Args:
        streams: The device.
        least: Contexts of fewer encoded bytes stay.
        prefetch: Whether a context is brought back before it is asked for; False is for measuring
            what that is worth, see ``experiments/swap.py``.
    """

    def __init__(self, streams: Streams, least: int = LEAST_BYTES, prefetch: bool = True) -> None:
        self.streams = streams
        self.least = least
        self.prefetch = prefetch
        self.pool = Pool(streams.pinned)

    def __reduce__(self) -> tuple[type[Swapping], tuple[Streams, int, bool]]:
        """A copy, pickled or deep-copied with its model, has buffers of its own."""
        return Swapping, (self.streams, self.least, self.prefetch)


class Swapped(Encoded):
    """An encoded context whose tensors lie in host memory."""

    def __init__(
        self, swap: Swap, number: int, host: Encoded, device: torch.device, buffer: Buffer
    ) -> None:
        self.codec, self.bits, self.exact = host.codec, host.bits, host.exact
        self.number = number
        self.host = host
        self.device = device
        self.buffer = buffer
        self._swap = swap

    @property
    def nbytes(self) -> int:
        return self.host.nbytes

    @property
    def host_bytes(self) -> int:
        return self.host.nbytes

    def decode(self) -> Tensor:
        return self.fetched().decode()

    def reread(self) -> Encoded:
        return _Read(self, "reread")

    def alone(self) -> Encoded:
        return _Read(self, "alone")

    def fetched(self) -> Encoded:
        """With its tensors on the device."""
        return self._swap.read(self)


class _Read(Encoded):
    """A swapped context that is decoded in another reading: what this method of it gives."""

    def __init__(self, swapped: Swapped, reading: str) -> None:
        self.codec, self.bits, self.exact = swapped.codec, swapped.bits, swapped.exact
        self._swapped = swapped
        self._reading = reading

    @property
    def nbytes(self) -> int:
        return self._swapped.nbytes

    def decode(self) -> Tensor:
        encoded: Encoded = getattr(self._swapped.fetched(), self._reading)()
        return encoded.decode()


@dataclass(frozen=True)
class _Leaving:
    """Tensors of a device that are being copied to the host."""

    tensors: tuple[Tensor, ...]
    nbytes: int
    given_by: Any
    read_by: Any
    done: Any


class _Coming:
    """Tensors of a device that are being copied from the host."""

    def __init__(
        self, streams: Streams, swapped: Swapped, tensors: tuple[Tensor, ...], given_by: Any
    ) -> None:
        self.nbytes = swapped.nbytes
        self.done = swapped.buffer.last
        self._streams = streams
        self._tensors = tensors
        self._given_by = given_by

    def take(self, reader: Any) -> tuple[Tensor, ...]:
        """The tensors, for what the stream ``reader`` is asked from now on."""
        tensors, self._tensors = self._tensors, ()
        self._streams.wait(reader, self.done)
        for tensor in tensors:
            self._streams.lend(tensor, reader)
        return tensors

    def __del__(self) -> None:
        # Nobody took them: without this the memory would be reused while the copy fills it.
        if self._tensors:
            self._streams.wait(self._given_by, self.done)


class Swap:
    """The contexts of one forward that were swapped, in the order in which they were packed.

    Backward mostly reads them in the reverse order; that is a hint, and decides on nothing but
    which one is brought back before it is asked for.
    """

    def __init__(self, shared: Swapping) -> None:
        self._streams = shared.streams
        self._pool = shared.pool
        self._least = shared.least
        self._prefetch = shared.prefetch
        # Backward runs on a thread a device.
        self._lock = threading.Lock()
        self._packed: list[weakref.ref[Swapped]] = []
        self._leaving: deque[_Leaving] = deque()
        self._coming: dict[int, _Coming] = {}
        self._lately: deque[int] = deque(maxlen=_PATIENCE)
        self._passed_over = 0

    def leave(self, encoded: Encoded) -> Encoded:
        """What stands for a context that was just encoded: itself, or its swapped form."""
        streams, tensors = self._streams, encoded.movable()
        if not tensors or encoded.nbytes < self._least or not streams.serves(tensors[0].device):
            return encoded
        device = tensors[0].device
        buffer = self._pool.take(room_for(tensors))
        with self._lock:
            host = encoded.moved(*buffer.like(tensors))
            swapped = Swapped(self, len(self._packed), host, device, buffer)
            weakref.finalize(swapped, self._pool.give, buffer).atexit = False
            self._packed.append(weakref.ref(swapped))
            giver, offload = streams.current(device), streams.side(device, OFFLOAD)
            streams.wait(offload, streams.record(giver))
            if buffer.last is not None:
                streams.wait(offload, buffer.last)
            for piece, tensor in zip(host.movable(), tensors, strict=True):
                streams.copy(piece, tensor, offload)
            buffer.last = streams.record(offload)
            self._leaving.append(_Leaving(tensors, encoded.nbytes, giver, offload, buffer.last))
            while len(self._leaving) > 1 and sum(x.nbytes for x in self._leaving) > _LEAVING_BYTES:
                first = self._leaving.popleft()
                streams.wait(first.given_by, first.done)
        return swapped

    def close(self) -> None:
        """Lets go of what is still leaving, at the end of forward."""
        with self._lock:
            for leaving in self._leaving:
                for tensor in leaving.tensors:
                    self._streams.lend(tensor, leaving.read_by)
            self._leaving.clear()

    def read(self, swapped: Swapped) -> Encoded:
        """The encoded form with tensors on the device, for the stream that computes there now."""
        with self._lock:
            number = swapped.number
            coming = self._coming.pop(number, None)
            self._passed_over = 0 if coming is not None else self._passed_over + 1
            coming = coming or self._fetch(swapped)
            tensors = coming.take(self._streams.current(swapped.device))
            self._lately.append(number)
            if self._prefetch:
                self._fetch_ahead(number)
        return swapped.host.moved(*tensors)

    def _fetch(self, swapped: Swapped) -> _Coming:
        streams, device, buffer = self._streams, swapped.device, swapped.buffer
        pieces = swapped.host.movable()
        giver, prefetch = streams.current(device), streams.side(device, PREFETCH)
        tensors = tuple(streams.empty_like(piece, device) for piece in pieces)
        streams.wait(prefetch, streams.record(giver))
        streams.wait(prefetch, buffer.last)
        for tensor, piece in zip(tensors, pieces, strict=True):
            streams.copy(tensor, piece, prefetch)
        buffer.last = streams.record(prefetch)
        return _Coming(streams, swapped, tensors, giver)

    def _fetch_ahead(self, number: int) -> None:
        """Brings back the last ones packed before ``number`` that live and were not read just now.

        An operation that saved two contexts reads them in the order in which they were packed.
        """
        wanted = self._passed_over < _PATIENCE
        self._coming = {n: c for n, c in self._coming.items() if wanted and self._packed[n]()}
        nbytes = sum(coming.nbytes for coming in self._coming.values())
        for earlier in range(number - 1, -1, -1):
            if len(self._coming) >= _COMING:
                return
            swapped = self._packed[earlier]()
            if swapped is None or earlier in self._lately or earlier in self._coming:
                continue
            nbytes += swapped.nbytes
            if self._coming and nbytes > _COMING_BYTES:
                return
            self._coming[earlier] = self._fetch(swapped)
