"""The masks of activations and dropouts: where their results are zero, and one mask for both.

ReLU saves which elements are positive, dropout which ones it keeps. Where nothing else reads the
tensor between them, the gradient passes both or none: backward needs the conjunction alone. The
result is zero where its mask has no bit, so an operation that saves it needs the others only.
"""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from gact_graph.capture.dropout import noise_of
from gact_graph.capture.nodes import saved_as
from gact_graph.capture.trace import NODE, Call
from gact_graph.codecs import Saved
from gact_graph.codecs.mask import Joint, Masked
from gact_graph.support.storage import is_plain, key_of
from gact_graph.support.torch_private import next_sequence_number


class _Pair(NamedTuple):
    """A tensor between an activation and a dropout.

    Attributes:
        between: The tensor's storage.
        result: The storage of the result of the dropout.
        nodes: The sequence number of the thread's next autograd node, right after the dropout.
        side: The saved result of the activation.
        noise: The saved noise of the dropout.
    """

    between: StorageWeakRef
    result: StorageWeakRef
    nodes: int
    side: Saved
    noise: Saved


class JointMasks:
    """Joins the masks of the last activation and dropout once the tensor between them is gone."""

    def __init__(self) -> None:
        self._pair: _Pair | None = None
        self._asked: StorageWeakRef | None = None  # of the last tensor that was asked for its node

    def see(self, call: Call, result: Any) -> None:
        """Record the tensor that a dropout reads, if an activation has just made it."""
        x = call.argument(0, "input", "self")
        if call.name != "dropout" or not isinstance(result, Tensor) or not isinstance(x, Tensor):
            return
        side, noise = saved_as(x, "Relu", "result"), noise_of(result)
        if side is None or noise is None or x._backward_hooks or x.retains_grad:
            return
        between, made = key_of(x), key_of(result)
        if self._is_asked(between):
            return
        first, second = x.grad_fn, result.grad_fn
        assert first is not None and second is not None
        if second._sequence_nr() == first._sequence_nr() + 1:
            self._pair = _Pair(between, made, next_sequence_number(), side, noise)

    def settle(self, call: Call | None = None) -> None:
        """Join the masks of the recorded pair if no node reads the tensor between, nor ever can.

        Args:
            call: The operation that runs next. If it adds a hook to the tensor, or asks for a node
                that may get one, the masks stay apart: the hook may return any gradient.
        """
        if call is not None and call.func == NODE and is_plain(call.args[0]):
            self._asked = key_of(call.args[0])
        pair = self._pair
        if pair is None:
            return
        # An operation that read the tensor would have made a node and advanced the number; once its
        # memory is freed, none can read it.
        if next_sequence_number() != pair.nodes or self._may_add_hook(call, pair):
            self._pair = None
        elif pair.between.expired():
            self._pair = None
            _join(pair.side, pair.noise)

    def _is_asked(self, storage: StorageWeakRef) -> bool:
        return self._asked is not None and bool(storage == self._asked)

    def _may_add_hook(self, call: Call | None, pair: _Pair) -> bool:
        if self._is_asked(pair.between) or self._is_asked(pair.result):
            return True
        if call is None or call.name != "register_hook":
            return False
        x = call.argument(0, "self")
        return is_plain(x) and bool(key_of(x) == pair.between)


def _join(side: Saved, noise: Saved) -> None:
    kept, passed = noise.context.encoded, side.context.encoded
    if type(kept) is not Masked or type(passed) is not Masked or passed.exact:
        return
    if kept.low != 0 or kept.high <= 0 or side.layout != noise.layout:
        return
    noise.context.encoded = dataclasses.replace(kept, words=kept.words & passed.words)
    side.context.encoded = Joint(noise)


def mask_of(tensor: Tensor) -> Saved | None:
    """Return a saved tensor that is zero only where this one is, unless this one changed since.

    That is the result of ReLU, or the noise of the dropout that made the tensor.
    """
    relu, dropout = saved_as(tensor, "Relu", "result"), noise_of(tensor)
    return relu or dropout or saved_as(tensor, "NativeDropout", "result1")
