"""Level ``L2``: contexts are offloaded in forward, and prefetched in backward.

Those of a CUDA device wait in host memory, those of a CPU in files.

Events order the work on a device; the host waits only to pin a buffer for the first time:

- The offload stream waits for the stream that encoded the context, and for the last copy from the
  host buffer. Then it copies.
- The prefetch stream waits for the copy to the host, and for the computing stream, which allocates
  the memory of the copy back and may still use it. Then it copies.
- The stream that decodes waits for that copy.
- Device memory that a side stream used is freed after its allocating stream has been made to wait
  for the side stream, so the allocator reuses it in stream order. ``record_stream`` would delay the
  reuse until the host sees the copy complete, and since the host runs ahead of the device, all
  contexts would be in device memory at once. ``record_stream`` is used where waiting would cost
  more (the end of forward), or if another stream computes than at the start.
"""

from __future__ import annotations

import threading
import weakref
from collections import deque
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor

from gact_graph.codecs import Encoded, Kept, Saved
from gact_graph.codecs.base import Copied
from gact_graph.codecs.offload.pinned import Buffer, Pool, room_for
from gact_graph.codecs.offload.streams import OFFLOAD, PREFETCH, Streams
from gact_graph.support.part import in_proportion
from gact_graph.support.storage import is_plain

LEAST_BYTES = 2**20
"""The least encoded bytes of a swapped context. Over PCIe their copy takes some 40 us, about as
long as the host takes to enqueue copies and events."""

# Bytes that may be in flight to the host before the computing stream waits for the first of them: a
# few milliseconds of copies, to even out operations that save more and less.
_LEAVING_BYTES = 64 * 2**20

# Contexts that may be prefetched at once, and their bytes if there are several: the bus is not idle
# between small contexts, and large ones do not fill the device.
_COMING = 3
_COMING_BYTES = 64 * 2**20

# Prefetched contexts are dropped after this many other contexts were read instead.
_PATIENCE = 4


class Swapping:
    """The state that all forwards of a wrapped model share.

    Args:
        streams: The streams of the device.
        least: The least encoded bytes of a swapped context.
        prefetch: Whether contexts are copied back before they are read. False for files, whose
            copies do not overlap with computation, and to measure the gain.
    """

    def __init__(self, streams: Streams, least: int = LEAST_BYTES, prefetch: bool = True) -> None:
        self.streams = streams
        self.least = least
        self.prefetch = prefetch
        self.pool: Final = Pool(streams.buffer)

    def __reduce__(self) -> tuple[type[Swapping], tuple[Streams, int, bool]]:
        """Give a copy, pickled or deep-copied with its model, new buffers."""
        return Swapping, (self.streams, self.least, self.prefetch)


class Swapped(Encoded):
    """An encoded context whose tensors are in host memory."""

    def __init__(
        self, swap: Swap, number: int, host: Encoded, device: torch.device, buffer: Buffer
    ) -> None:
        self.codec: str = host.codec
        self.bits: float | None = host.bits
        self.exact: bool = host.exact
        self.coded: int | None = host.coded
        self.sources: tuple[Saved, ...] = host.sources
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

    def decorrelated(self) -> Encoded:
        return _OtherDecoding(self, "decorrelated")

    def min_variance(self) -> Encoded:
        return _OtherDecoding(self, "min_variance")

    def fetched(self) -> Encoded:
        """Return the encoded form with its tensors on the device."""
        return self._swap.read(self)


class _OtherDecoding(Encoded):
    """A swapped context with another decoding: the name of a method that returns it."""

    def __init__(self, swapped: Swapped, decoding: str) -> None:
        self.codec, self.bits, self.exact = swapped.codec, swapped.bits, swapped.exact
        self._swapped = swapped
        self._decoding = decoding

    @property
    def nbytes(self) -> int:
        return self._swapped.nbytes

    def decode(self) -> Tensor:
        encoded: Encoded = getattr(self._swapped.fetched(), self._decoding)()
        return encoded.decode()


@dataclass(frozen=True)
class _Leaving:
    """Device tensors that are being copied to the host."""

    tensors: tuple[Tensor, ...]
    nbytes: int
    allocated_on: Any
    copied_on: Any
    done: Any


class _Coming:
    """Device tensors that are being copied from the host."""

    def __init__(
        self, streams: Streams, swapped: Swapped, tensors: tuple[Tensor, ...], allocated_on: Any
    ) -> None:
        self.nbytes = swapped.nbytes
        self.done = swapped.buffer.last
        self._streams = streams
        self._tensors = tensors
        self._allocated_on = allocated_on

    def take(self, reader: Any) -> tuple[Tensor, ...]:
        """Return the tensors for later work of the stream ``reader``."""
        tensors, self._tensors = self._tensors, ()
        self._streams.wait(reader, self.done)
        for tensor in tensors:
            self._streams.lend(tensor, reader)
        return tensors

    def __del__(self) -> None:
        # Not taken: the memory must not be reused while the copy fills it.
        if self._tensors:
            self._streams.wait(self._allocated_on, self.done)


class Swap:
    """The swapped contexts of one forward, in the order in which they were packed.

    Backward mostly reads them in reverse order; that order only decides which contexts are
    prefetched.
    """

    def __init__(self, shared: Swapping) -> None:
        self._streams = shared.streams
        self._pool = shared.pool
        self._least = in_proportion(shared.least)
        self._prefetch = shared.prefetch
        # Backward runs on one thread per device.
        self._lock = threading.Lock()
        self._packed: list[weakref.ref[Swapped]] = []
        self._leaving: deque[_Leaving] = deque()
        self._coming: dict[int, _Coming] = {}
        self._lately: deque[int] = deque(maxlen=_PATIENCE)
        self._passed_over = 0

    def leave(self, encoded: Encoded) -> Encoded:
        """Return the swapped form of an encoded context; the context itself if it is small."""
        streams = self._streams
        encoded = self._movable(encoded)
        tensors = encoded.movable()
        if not tensors or encoded.nbytes < self._least or not streams.serves(tensors[0].device):
            return encoded
        device = tensors[0].device
        buffer = self._pool.take(room_for(tensors))
        with self._lock:
            host = encoded.moved(*buffer.like(tensors))
            swapped = Swapped(self, len(self._packed), host, device, buffer)
            weakref.finalize(swapped, self._pool.give, buffer).atexit = False
            self._packed.append(weakref.ref(swapped))
            allocating, offload = streams.current(device), streams.side(device, OFFLOAD)
            streams.wait(offload, streams.record(allocating))
            if buffer.last is not None:
                streams.wait(offload, buffer.last)
            for piece, tensor in zip(host.movable(), tensors, strict=True):
                streams.copy(piece, tensor, offload)
            buffer.last = streams.record(offload)
            if not streams.copies_later:
                return swapped
            self._leaving.append(
                _Leaving(tensors, encoded.nbytes, allocating, offload, buffer.last)
            )
            while len(self._leaving) > 1 and sum(x.nbytes for x in self._leaving) > _LEAVING_BYTES:
                first = self._leaving.popleft()
                streams.wait(first.allocated_on, first.done)
        return swapped

    def _movable(self, encoded: Encoded) -> Encoded:
        """Return a copy of a large tensor that is kept by reference; other forms as they are.

        The model may change the tensor while a copy to the host is under way.
        """
        if not isinstance(encoded, Kept) or not is_plain(encoded.tensor):
            return encoded
        tensor = encoded.tensor
        if tensor.nbytes < self._least or not self._streams.serves(tensor.device):
            return encoded
        return Copied(tensor.clone() if self._streams.copies_later else tensor, Kept.codec)

    def close(self) -> None:
        """Release the tensors of unfinished copies, at the end of forward."""
        with self._lock:
            for leaving in self._leaving:
                for tensor in leaving.tensors:
                    self._streams.lend(tensor, leaving.copied_on)
            self._leaving.clear()

    def read(self, swapped: Swapped) -> Encoded:
        """Return the encoded form with tensors on the device, for its current stream."""
        with self._lock:
            number = swapped.number
            coming = self._coming.pop(number, None)
            self._passed_over = 0 if coming is not None else self._passed_over + 1
            coming = coming or self._fetch_now(swapped)
            tensors = coming.take(self._streams.current(swapped.device))
            self._lately.append(number)
            if self._prefetch:
                self._fetch_ahead(number)
        return swapped.host.moved(*tensors)

    def _fetch_now(self, swapped: Swapped) -> _Coming:
        """Fetch a context that is read; if memory is short, drop the prefetched ones first."""
        try:
            return self._fetch(swapped)
        except torch.OutOfMemoryError:
            if not self._coming:
                raise
        # Not in the handler: the traceback holds tensors.
        self._coming.clear()
        return self._fetch(swapped)

    def _fetch(self, swapped: Swapped) -> _Coming:
        streams, device, buffer = self._streams, swapped.device, swapped.buffer
        pieces = swapped.host.movable()
        allocating, prefetch = streams.current(device), streams.side(device, PREFETCH)
        tensors = tuple(streams.empty_like(piece, device) for piece in pieces)
        streams.wait(prefetch, streams.record(allocating))
        streams.wait(prefetch, buffer.last)
        for tensor, piece in zip(tensors, pieces, strict=True):
            streams.copy(tensor, piece, prefetch)
        buffer.last = streams.record(prefetch)
        return _Coming(streams, swapped, tensors, allocating)

    def _fetch_ahead(self, number: int) -> None:
        """Prefetch the last live contexts before ``number`` that were not read recently.

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
            try:
                self._coming[earlier] = self._fetch(swapped)
            except torch.OutOfMemoryError:
                return  # it is fetched when it is read
