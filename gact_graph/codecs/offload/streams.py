"""The device operations of swapping: two side streams, events and copies.

Only :class:`CudaStreams` calls CUDA; ``files`` has the same for a CPU. Each method is one call, so
that tests can verify the order of calls, which ``swap`` decides, without a GPU.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

OFFLOAD, PREFETCH = "offload", "prefetch"
"""The names of the streams that copy contexts to the host and back."""


class Streams:
    """The device operations; by default, streams and events are None, and nothing waits.

    Attributes:
        copies_later: Whether copies may run after :meth:`copy` has returned.
    """

    copies_later: bool

    def serves(self, device: torch.device) -> bool:
        """Return whether contexts of this device can be offloaded."""
        raise NotImplementedError

    def buffer(self, nbytes: int) -> Tensor:
        """Return memory [nbytes] uint8 for contexts that wait for backward."""
        raise NotImplementedError

    def empty_like(self, host: Tensor, device: torch.device) -> Tensor:
        """Return memory of the device for a copy of ``host``, allocated on its current stream."""
        return torch.empty(host.shape, dtype=host.dtype, device=device)

    def current(self, device: torch.device) -> Any:
        """Return the current stream of the device in this thread."""

    def side(self, device: torch.device, name: str) -> Any:
        """Return the side stream of this name, the same at each call."""

    def record(self, stream: Any) -> Any:
        """Return an event that completes after all work queued on the stream so far."""

    def wait(self, stream: Any, event: Any) -> None:
        """Make later work of the stream wait for the event, without blocking the host."""

    def copy(self, target: Tensor, source: Tensor, stream: Any) -> None:
        """Queue a copy on the stream, without blocking the host."""
        raise NotImplementedError

    def lend(self, tensor: Tensor, stream: Any) -> None:
        """Delay the reuse of the tensor's memory until the stream's queued work completes."""


class CudaStreams(Streams):
    """CUDA streams, created at first use."""

    copies_later = True

    def __init__(self) -> None:
        self._sides: dict[tuple[torch.device, str], torch.cuda.Stream] = {}

    def serves(self, device: torch.device) -> bool:
        return device.type == "cuda"

    def buffer(self, nbytes: int) -> Tensor:
        # Explicit, because the default device may be another one.
        return torch.empty(nbytes, dtype=torch.uint8, device="cpu", pin_memory=True)

    def current(self, device: torch.device) -> torch.cuda.Stream:
        return torch.cuda.current_stream(device)

    def side(self, device: torch.device, name: str) -> torch.cuda.Stream:
        # Two threads may both create a stream; with setdefault, both use the first.
        key = device, name
        return self._sides.get(key) or self._sides.setdefault(key, torch.cuda.Stream(device))

    def record(self, stream: torch.cuda.Stream) -> torch.cuda.Event:
        return stream.record_event()

    def wait(self, stream: torch.cuda.Stream, event: torch.cuda.Event) -> None:
        stream.wait_event(event)

    def copy(self, target: Tensor, source: Tensor, stream: torch.cuda.Stream) -> None:
        with torch.cuda.stream(stream):
            target.copy_(source, non_blocking=True)

    def lend(self, tensor: Tensor, stream: torch.cuda.Stream) -> None:
        # Does nothing on the stream that allocated the memory.
        tensor.record_stream(stream)

    def __reduce__(self) -> tuple[type[CudaStreams], tuple[()]]:
        """Give a copy, pickled or deep-copied with its model, new streams."""
        return CudaStreams, ()
