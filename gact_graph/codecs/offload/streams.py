"""What swapping asks of a device: two streams of its own, events, and copies.

:class:`CudaStreams` is all of the library that calls CUDA for it. Each method is one such call, so
that the order of the calls, which ``swap`` decides, can be tested without a GPU.
"""

from __future__ import annotations

from typing import Any, Protocol

import torch
from torch import Tensor

OFFLOAD, PREFETCH = "offload", "prefetch"
"""The streams on which contexts leave a device and come back to it."""


class Streams(Protocol):
    """Streams and events are whatever the implementation gives; they are only handed back."""

    def serves(self, device: torch.device) -> bool:
        """Whether contexts can leave this device."""

    def pinned(self, nbytes: int) -> Tensor:
        """Host memory [nbytes] uint8 that copies reach without waiting for the host."""

    def empty_like(self, host: Tensor, device: torch.device) -> Tensor:
        """Memory of the device for a copy of ``host``, given by its current stream."""

    def current(self, device: torch.device) -> Any:
        """The stream that computes on the device now, in this thread."""

    def side(self, device: torch.device, name: str) -> Any:
        """The device's stream of this name, the same at each call."""

    def record(self, stream: Any) -> Any:
        """An event: all that the stream was asked so far is done."""

    def wait(self, stream: Any, event: Any) -> None:
        """What the stream is asked from now on starts after the event. The host goes on."""

    def copy(self, target: Tensor, source: Tensor, stream: Any) -> None:
        """Asks the stream for a copy. The host goes on."""

    def lend(self, tensor: Tensor, stream: Any) -> None:
        """Once the tensor is freed, its memory is reused only after what the stream was asked."""


class CudaStreams:
    """Streams of CUDA, made at first use: one process may never need them."""

    def __init__(self) -> None:
        self._sides: dict[tuple[torch.device, str], torch.cuda.Stream] = {}

    def serves(self, device: torch.device) -> bool:
        return device.type == "cuda"

    def pinned(self, nbytes: int) -> Tensor:
        # Named, because the user may have set another default device.
        return torch.empty(nbytes, dtype=torch.uint8, device="cpu", pin_memory=True)

    def empty_like(self, host: Tensor, device: torch.device) -> Tensor:
        return torch.empty(host.shape, dtype=host.dtype, device=device)

    def current(self, device: torch.device) -> torch.cuda.Stream:
        return torch.cuda.current_stream(device)

    def side(self, device: torch.device, name: str) -> torch.cuda.Stream:
        # Two threads may both make one; setdefault lets all use the first.
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
        # On the stream that gave the memory this does nothing.
        tensor.record_stream(stream)

    def __reduce__(self) -> tuple[type[CudaStreams], tuple[()]]:
        """A copy, pickled or deep-copied with its model, makes streams of its own."""
        return CudaStreams, ()
