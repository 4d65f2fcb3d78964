"""Hooks on the modules of a wrapped model: they tell its session which module and phase runs.

They hold no session, so that modules stay picklable, and find it through the thread that runs.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle
from torch_geometric.nn import MessagePassing

from gact_graph.heap import give_back_now_and_then

_local = threading.local()


def current() -> Any:
    """The session that captures on this thread, or None."""
    return getattr(_local, "session", None)


def set_current(session: Any) -> None:
    """Makes ``session`` (or None) the one that captures on this thread."""
    _local.session = session


@contextmanager
def unseen() -> Iterator[None]:
    """No session follows what happens on this thread meanwhile."""
    session = current()
    with ExitStack() as stack:
        if session is not None:
            stack.enter_context(session.trace.paused())
        stack.callback(set_current, session)
        set_current(None)
        yield


def unpack(saved: Any) -> torch.Tensor:
    """The unpack hook of all that packs to :class:`gact_graph.codecs.Saved`."""
    collected = getattr(_local, "collected", None)
    if collected is None:
        tensor: torch.Tensor = saved.tensor()
        give_back_now_and_then(tensor)
        return tensor
    collected.append(saved)
    return torch.empty(0)  # autograd asks for a tensor, nobody reads it


def saved_by(ctx: Any) -> list[Any] | None:
    """What stands for a function's ``saved_tensors``; None if other hooks hold some of them."""
    outer = getattr(_local, "collected", None)
    collected: list[Any] = []
    _local.collected = collected
    try:
        count = len(ctx.saved_tensors)
    finally:
        _local.collected = outer
    return collected if len(collected) == count else None


class Owner:
    """Tells the hooks of one wrapped model from those of others, by identity.

    A copy of the model, pickled or deep-copied, has another one, and its hooks share it.
    """


def session_of(owner: Owner) -> Any:
    """The session that captures on this thread if it is this owner's, or None."""
    session = current()
    return session if session is not None and session.owner is owner else None


class Hook:
    """What all hooks know: whose they are, and the name of their module or phase."""

    def __init__(self, owner: Owner, name: str) -> None:
        self.owner = owner
        self.name = name


class EnterModule(Hook):
    """Forward pre-hook on a submodule."""

    def __call__(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        session = session_of(self.owner)
        if session is not None:
            session.enter(self.name, (args, kwargs))


class LeaveModule(Hook):
    """Forward hook on a submodule, called also when its forward raises."""

    def __call__(self, module: nn.Module, args: Any, output: Any) -> None:
        session = session_of(self.owner)
        if session is not None:
            session.trace.leave(self.name)


class EnterPhase(Hook):
    """Pre-hook on a phase of message passing, such as ``message``."""

    def __call__(self, module: nn.Module, args: Any) -> None:
        session = session_of(self.owner)
        if session is not None:
            session.trace.enter_phase(self.name)


class LeavePhase(Hook):
    """Hook after a phase; its result is left as it is."""

    def __call__(self, module: nn.Module, args: Any, output: Any) -> None:
        session = session_of(self.owner)
        if session is not None:
            session.trace.leave_phase(self.name)


class Propagated(Hook):
    """Hook after ``propagate``, which knows how many nodes and edges there are."""

    def __call__(self, module: nn.Module, args: Any, output: Any) -> None:
        session = session_of(self.owner)
        if session is not None:
            edge_index, size, _ = args
            session.sizes.add(edge_index, size)


def attach(owner: Owner, model: nn.Module) -> Iterator[RemovableHandle]:
    """Puts the hooks on the model and its submodules; yields what removes them."""
    for name, module in model.named_modules():
        if module is not model:
            enter, leave = EnterModule(owner, name), LeaveModule(owner, name)
            yield module.register_forward_pre_hook(enter, with_kwargs=True)
            yield module.register_forward_hook(leave, always_call=True)
        if isinstance(module, MessagePassing):
            yield module.register_propagate_forward_hook(Propagated(owner, "propagate"))
            for phase, before, after in _phases(module):
                yield before(EnterPhase(owner, phase))
                yield after(LeavePhase(owner, phase))


def _phases(
    module: MessagePassing,
) -> Iterator[tuple[str, Callable[..., RemovableHandle], Callable[..., RemovableHandle]]]:
    for phase in ("edge_update", "message", "aggregate", "message_and_aggregate"):
        yield (
            phase,
            getattr(module, f"register_{phase}_forward_pre_hook"),
            getattr(module, f"register_{phase}_forward_hook"),
        )
