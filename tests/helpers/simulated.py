"""A device for the tests of swapping: streams that lag behind, as a seed decides.

What the computing stream is asked is done at once, by the CPU. The side streams do what they are
asked some time later, in order, and not before the events that they wait for. Memory starts as
garbage, and the device complains where a real one would go wrong without a word: a copy from or to
memory that was let go too early.
"""

from __future__ import annotations

import random
import weakref
from collections import deque
from typing import Any

import torch
from torch import Tensor

from gact_graph.codecs.offload.streams import OFFLOAD, PREFETCH


class Stream:
    def __init__(self, name: str) -> None:
        self.name = name
        self.asked: deque[tuple[str, Any]] = deque()


class Event:
    def __init__(self, stream: Stream) -> None:
        self.stream = stream
        self.done = False


class Simulated:
    """Takes CPU tensors for those of a device.

    Args:
        seed: Decides how much the side streams do at each call; None: nothing before they are
            waited for.
    """

    copies_later = True

    def __init__(self, seed: int | None = None) -> None:
        self.compute = Stream("compute")
        self.sides = {name: Stream(name) for name in (OFFLOAD, PREFETCH)}
        self.log: list[tuple[Any, ...]] = []
        self.host: list[Tensor] = []
        self._random = None if seed is None else random.Random(seed)

    def serves(self, device: torch.device) -> bool:
        return True

    def buffer(self, nbytes: int) -> Tensor:
        self.host.append(torch.full((nbytes,), 0x5A, dtype=torch.uint8))
        return self.host[-1]

    def empty_like(self, host: Tensor, device: torch.device) -> Tensor:
        tensor = torch.empty_like(host)
        tensor.view(torch.uint8).fill_(0x5A)
        return tensor

    def current(self, device: torch.device) -> Stream:
        return self.compute

    def side(self, device: torch.device, name: str) -> Stream:
        return self.sides[name]

    def record(self, stream: Stream) -> Event:
        event = Event(stream)
        self.log.append(("record", stream.name, event))
        if stream.name.startswith("compute"):
            event.done = True
        else:
            stream.asked.append(("record", event))
        self._go_on()
        return event

    def wait(self, stream: Stream, event: Event) -> None:
        self.log.append(("wait", stream.name, event))
        if stream.name.startswith("compute"):
            self._run(event.stream, event)
        else:
            stream.asked.append(("wait", event))
        self._go_on()

    def copy(self, target: Tensor, source: Tensor, stream: Stream) -> None:
        self.log.append(("copy", stream.name, source.nbytes))
        # The side in host memory stays: its buffer goes to the pool or to torch, which looks after
        # copies under way. The other side must be held by somebody.
        pair = tuple(t if self._in_host(t) else weakref.ref(t) for t in (target, source))
        stream.asked.append(("copy", pair))
        self._go_on()

    def lend(self, tensor: Tensor, stream: Stream) -> None:
        self.log.append(("lend", stream.name))
        stream.asked.append(("hold", tensor))
        self._go_on()

    def finish(self) -> None:
        """Everything that was asked is done."""
        for stream in self.sides.values():
            self._run(stream)

    def _in_host(self, tensor: Tensor) -> bool:
        place = tensor.untyped_storage().data_ptr()
        return any(memory.untyped_storage().data_ptr() == place for memory in self.host)

    def _go_on(self) -> None:
        if self._random is not None:
            stream = self._random.choice([*self.sides.values()])
            for _ in range(self._random.randrange(4)):
                self._step(stream)

    def _run(self, stream: Stream, until: Event | None = None) -> None:
        while stream.asked and not (until is not None and until.done):
            if not self._step(stream):
                kind, event = stream.asked[0]
                assert kind == "wait"
                self._run(event.stream, event)
        assert until is None or until.done, "somebody waits for what was never asked"

    def _step(self, stream: Stream) -> bool:
        """Does the next thing; False where there is none, or it must wait."""
        if not stream.asked:
            return False
        kind, what = stream.asked[0]
        if kind == "wait" and not what.done:
            return False
        stream.asked.popleft()
        if kind == "record":
            what.done = True
        elif kind == "copy":
            target, source = (t() if isinstance(t, weakref.ref) else t for t in what)
            assert target is not None, "memory was let go before a copy had filled it"
            assert source is not None, "memory was let go before a copy had read it"
            target.copy_(source)
        return True
