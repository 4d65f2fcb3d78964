"""The session that captures on this thread, and its interface for layers.

Hooks and patched methods hold no session themselves, so that modules stay picklable.
"""

from __future__ import annotations

import functools
import uuid
from collections.abc import Callable, Collection, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.jit import is_tracing  # type: ignore[attr-defined]

from gact_graph.support.memory.policy import memory_policy
from gact_graph.support.messages import advising, warn
from gact_graph.support.scopes import Scopes
from gact_graph.support.torch_private import (
    function_transform,
    in_forward_mode,
    is_batched,
    saved_tensor_hooks,
)


class Coding(NamedTuple):
    """The quantization of node tensors during backward of a recomputed layer."""

    bits: int
    group_size: int
    seed: int


class Product(NamedTuple):
    """The product of node rows and a weight, ``x @ weight.T``.

    Args:
        x: The rows [N, F], contiguous.
        weight: The weight [W, F].
    """

    x: Tensor
    weight: Tensor

    def write(self, result: Tensor) -> None:
        """Write the product into a tensor [N, W]."""
        torch.mm(self.x, self.weight.t(), out=result)


class Steps(Protocol):
    """The interface of :class:`gact_graph.capture.trace.Trace` for layers."""

    def paused(self) -> AbstractContextManager[None]: ...

    def standing_for(
        self,
        name: str,
        tensors: dict[str, Tensor],
        extra_saved: Collection[str] = (),
        gathered: Collection[str] = (),
    ) -> AbstractContextManager[Any]: ...


class Capture(Protocol):
    """The interface of :class:`gact_graph.capture.session.Session` for layers."""

    owner: Owner

    @property
    def trace(self) -> Steps: ...

    @property
    def forward_runs(self) -> bool: ...

    @property
    def expects_double_backward(self) -> bool: ...

    def is_too_small(self, nbytes: int) -> bool: ...

    def add_sizes(self, edge_index: Any, size: Any) -> None: ...

    def add_layer_row(
        self, name: str, way: str, blocks: int | None, reason: str | None, counted: bool = True
    ) -> None: ...

    def count_unallocated(self, nbytes: int) -> None: ...

    def count_baseline(self, operation: Any, nbytes: int, tensors: dict[str, Tensor]) -> None: ...

    def coding_of(self, module: str) -> Coding | None: ...

    def settle(self) -> None: ...

    def is_input(self, tensor: Tensor) -> bool: ...

    def add_owned(self, tensor: Tensor) -> None: ...

    def product_of(self, tensor: Tensor) -> Product | None: ...

    def has_summed(self, label: str, result: Tensor, again: Callable[[], Tensor]) -> None: ...

    def pack(self, tensor: Tensor) -> Any: ...


class _State(NamedTuple):
    session: Capture | None = None
    disabled: bool = False
    uncompressed: Owner | None = None


_states = Scopes(_State())


def current() -> Capture | None:
    """Return the session that captures on this thread, or None."""
    return _states.value.session


def captured_by(session: Capture) -> AbstractContextManager[None]:
    """Capture with a session on this thread."""
    return _states.entered(_states.value._replace(session=session))


def forward_runs() -> bool:
    """Return whether the backward that runs now is part of a captured forward.

    Autograd's threads share the hooks of the thread that called backward.
    """
    hooks = saved_tensor_hooks(False)
    is_ours = hooks is not None and hooks[1] is unpack
    session = getattr(hooks[0], "__self__", None) if is_ours else current()
    return getattr(session, "forward_runs", False)


@contextmanager
def capture_disabled_in_backward() -> Iterator[None]:
    """Disable capture inside a backward that is part of a captured forward."""
    if not forward_runs():
        yield
        return
    with capture_disabled(), saved_tensors_hooks(Tensor.detach, lambda tensor: tensor):
        yield


@contextmanager
def capture_disabled() -> Iterator[None]:
    """Disable capture on this thread."""
    state = _states.value
    with ExitStack() as stack:
        if state.session is not None:
            stack.enter_context(state.session.trace.paused())
        stack.enter_context(_states.entered(state._replace(session=None, disabled=True)))
        yield


def is_busy() -> bool:
    """Return whether a session captures on this thread, or is disabled there."""
    state = _states.value
    return state.session is not None or state.disabled


def unpack(saved: Any) -> Tensor:
    """Return the tensor of a :class:`gact_graph.codecs.Saved`: the unpack hook."""
    tensor: Tensor
    try:
        tensor = saved.tensor()
    except torch.OutOfMemoryError:
        with advising(saved.advise):
            raise
    memory_policy.coded(tensor)
    return tensor


Backward = Callable[..., tuple[Tensor | None, ...]]


def with_advice(backward: Backward) -> Backward:
    """Decorate the backward of an autograd function to add advice to out-of-memory errors.

    The advice belongs to the step whose tensors the function has saved.
    """

    @functools.wraps(backward)
    def run(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        saved = saved_by(ctx)
        with advising(next((s.advise for s in saved or () if s is not None), None)):
            return backward(ctx, *gradients)

    return run


def saved_by(ctx: Any) -> list[Any] | None:
    """Return the packed forms of ``ctx.saved_tensors``; None if other hooks hold some of them.

    An entry is None where the function saved None, which no hook packs. Other hooks are not called:
    those of ``torch.utils.checkpoint`` would run a forward.
    """
    raw = ctx._raw_saved_tensors
    ours = all(t.unpack_hook is unpack or (t.unpack_hook is None and t.data is None) for t in raw)
    return [t.data for t in raw] if ours else None


def are_innermost() -> bool:
    """Return whether the innermost saved-tensor hooks are those of a session, or none are set."""
    hooks = saved_tensor_hooks(False)
    return hooks is None or hooks[1] is unpack


def packs_with(pack: Callable[[Tensor], Any]) -> bool:
    """Return whether the innermost saved-tensor hooks, if any are set, pack with this function."""
    hooks = saved_tensor_hooks(False)
    return hooks is not None and hooks[0] == pack


def is_transformed() -> bool:
    """Return whether ``torch.func``, ``torch.jit.trace`` or forward-mode differentiation runs.

    Models then run uncompressed: tensors inside ``torch.func`` (grad, vmap, jvp) have no memory to
    pack, and refuse saved-tensor hooks; a trace records operations without the hooks around them;
    and blocks have no forward-mode derivative.
    """
    return function_transform() is not None or in_forward_mode() or is_tracing()


def may_write(gradient: Tensor) -> bool:
    """Return whether backward may write a gradient over a decoded tensor.

    A backward that is differentiated again may not, nor one of a batch of gradients.
    """
    return not torch.is_grad_enabled() and not is_batched(gradient)


class Owner:
    """The identity of one wrapped model, shared by all of its hooks.

    A pickled or deep copy of the model has another owner.

    Attributes:
        tracked: Whether a tracked method of the model was ever called in training.
    """

    def __init__(self) -> None:
        self.tracked = False
        self._origin = uuid.uuid4().int

    def warn_unless_tracked(self, gradient: Tensor) -> None:
        """Warn once that nothing was compressed for a submodule: a hook on the output."""
        if self.tracked or self._origin in _warned:
            return
        _warned.add(self._origin)
        warn(
            "A backward reached layers of a model that gact_graph wraps, and nothing was "
            "compressed: neither the model's forward nor another tracked method called the layers. "
            "Name the method that the training loop calls, as in gact_graph.wrap(model, "
            "methods=('encode',)), or train inside `with gact_graph.compress(model)`. If the "
            "layers were copied out of a wrapped model, as to_hetero does, wrap the result: "
            "gact_graph.wrap(to_hetero(gact_graph.unwrap(model), metadata))."
        )

    def __getstate__(self) -> dict[str, Any]:
        return vars(self) | {"tracked": False}  # a copy is another model


_warned: set[int] = set()
"""The origins of models, and of parts copied out of them, for which a warning was given."""


def session_of(owner: Owner) -> Capture | None:
    """Return the session that captures this owner's model on this thread, or None.

    None while a compiler traces: compiled operations save other tensors.
    """
    if torch.compiler.is_compiling():
        return None
    session = current()
    return session if session is not None and session.owner is owner else None


@contextmanager
def uncompressed(owner: Owner, pack: Callable[[Tensor], Any]) -> Iterator[None]:
    """Run a model without compression on this thread.

    Args:
        owner: The owner of the model.
        pack: The pack hook for tensors that autograd saves.
    """
    state = _states.value._replace(uncompressed=owner)
    with _states.entered(state), saved_tensors_hooks(pack, unpack):
        yield


def is_uncompressed(owner: Owner) -> bool:
    """Return whether :func:`uncompressed` is active for this owner on this thread."""
    return _states.value.uncompressed is owner


class Hook:
    """A hook of a wrapped model, with the owner and the name of its module or phase."""

    def __init__(self, owner: Owner, name: str) -> None:
        self.owner = owner
        self.name = name
