"""A layer that is computed again in backward from its inputs, which alone are saved.

As activation checkpointing does, but what is saved passes through the hooks of the model, so that
it is compressed, and its random numbers are those of forward.
"""

from __future__ import annotations

import functools
import inspect
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.autograd.graph import GradientEdge, get_gradient_edge, saved_tensors_hooks
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten
from torch_geometric.nn import MessagePassing

from gact_graph import again, hooks
from gact_graph.codecs import Context, Kept, Saved
from gact_graph.heap import give_back
from gact_graph.inner import Coding, Given, Inner
from gact_graph.report import LayerRow
from gact_graph.stand_ins import learning, stand_ins
from gact_graph.storage import tensors_in
from gact_graph.surroundings import Surroundings

_SHARE = 0.5
"""Of the bytes of a layer's inputs but indices, that a result saved beside them takes at most."""


class CannotRecompute(Exception):
    """A layer must run as it is; the message says why."""


def attach(
    owner: hooks.Owner, rows: dict[str, LayerRow], model: nn.Module, blocks: bool
) -> Iterator[Recomputed]:
    """Puts a stand-in on each outermost message passing layer below the model; yields them."""
    outer: list[str] = []
    for name, module in model.named_modules():
        inside = any(name.startswith(f"{other}.") for other in outer)
        if isinstance(module, MessagePassing) and module is not model and not inside:
            outer.append(name)
            yield Recomputed(owner, rows, module, name, blocks)


class Recomputed:
    """Stands in for ``forward`` as an attribute of one layer.

    Args:
        owner: What the hooks on the model's submodules carry.
        rows: Gets what became of the layer.
        module: The layer.
        name: Its full name.
        blocks: Whether its edge work is done in blocks, if it can be.
    """

    def __init__(
        self,
        owner: hooks.Owner,
        rows: dict[str, LayerRow],
        module: nn.Module,
        name: str,
        blocks: bool,
    ) -> None:
        self._owner = owner
        self._rows = rows
        self._module = weakref.ref(module)
        self._name = name
        self._blocks = blocks
        self._tried = False
        self._reason: str | None = None
        self._unread: dict[tuple[bool, ...], frozenset[int]] = {}
        self._previous: Callable[..., Any] | None = vars(module).get("forward")
        module.forward = self

    def remove(self) -> None:
        """Puts what was there before in its place."""
        module = self._module()
        if module is not None and vars(module).get("forward") is self:
            del module.forward
            if self._previous is not None:
                module.forward = self._previous

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        module = self._module()
        assert module is not None  # whoever calls this attribute holds the layer
        inner = self._previous or functools.partial(type(module).forward, module)
        session = hooks.session_of(self._owner)
        if session is None or not torch.is_grad_enabled():
            return inner(*args, **kwargs)
        try:
            coding = session.coding_of_inner(self._name)
            call = _Call(module, inner, *_flat(args, kwargs), self._unread, coding)
            if not self._tried:
                self._try(call)
            if self._reason is not None:
                raise CannotRecompute(self._reason)
        except CannotRecompute as reason:
            self._rows[self._name] = LayerRow(self._name, "stock", None, str(reason))
            return inner(*args, **kwargs)
        self._rows[self._name] = LayerRow(self._name, "recomputed", None, None)
        named = _named(inner, args, kwargs)
        with session.trace.standing_for("forward", named), hooks.unseen():
            return call(named)

    @property
    def __signature__(self) -> inspect.Signature:
        module = self._module()
        assert module is not None
        return inspect.signature(self._previous or functools.partial(type(module).forward, module))

    def _try(self, call: _Call) -> None:
        """Finds out on the first call what a layer leaves behind."""
        self._tried = True
        before = dict(vars(call.module))
        surroundings = Surroundings({t.device.type for t in call.tensors})
        with hooks.unseen(), stand_ins(call.module), surroundings.again():
            if not (self._blocks and call.find_unread()):
                with torch.no_grad():
                    call.forward(call.tensors)
        for name, value in vars(call.module).items():
            changed = value is not before.get(name)
            if changed and isinstance(value, Tensor) and value.is_floating_point():
                self._reason = f"leaves a tensor in its attribute {name}"

    def __getstate__(self) -> dict[str, Any]:
        return vars(self) | {"_module": self._module()}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self._module = weakref.ref(state["_module"])


@dataclass
class _Call:
    """One call of a layer. What autograd holds of it has no tensors.

    ``unread`` is the layer's: by what needs a gradient, what it needs not compute again. ``coding``
    is that of what waits for blocks while it is computed again.
    """

    module: nn.Module
    inner: Callable[..., Any]
    tensors: tuple[Tensor, ...]
    others: list[Any]
    spec: TreeSpec
    unread: dict[tuple[bool, ...], frozenset[int]]
    coding: Coding | None

    def __call__(self, named: dict[str, Tensor]) -> Any:
        """What the layer gives. Adds to ``named``, for the report, what is saved beside inputs."""
        tensors = self.tensors
        self.tensors = ()
        self.surroundings = Surroundings({t.device.type for t in tensors})
        self.named = named
        results = _Recompute.apply(self, len(tensors), *tensors, *learning(self.module))
        del self.named
        given = iter(results)
        leaves = [next(given) if leaf is Tensor else leaf for leaf in self._out_leaves]
        return tree_unflatten(leaves, self._out_spec)

    def forward(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """The tensors of the result; what else is in it is remembered."""
        given = iter(tensors)
        leaves = [next(given) if leaf is Tensor else leaf for leaf in self.others]
        args, kwargs = tree_unflatten(leaves, self.spec)
        out, self._out_spec = tree_flatten(self.inner(*args, **kwargs))
        self._out_leaves = [Tensor if isinstance(leaf, Tensor) else leaf for leaf in out]
        return [leaf for leaf in out if isinstance(leaf, Tensor)]

    def find_unread(self) -> bool:
        """Finds out beforehand what needs not be computed again, without computing it.

        Otherwise the first backward would compute it once. False if that failed, as it does where
        the layer changes a result in place, of which there is but a shape.
        """
        learn = [t.requires_grad for t in self.tensors]
        calls = again.Calls(shapes_only=True)
        try:
            with again.counting(calls):
                given = zip(self.tensors, learn, strict=True)
                results = self.forward([t.detach().requires_grad_(need) for t, need in given])
        except RuntimeError:
            return False
        key = self._key([*learn, *(True for _ in learning(self.module))])
        self.unread[key] = calls.find_unread(results)
        return True

    def first(
        self, tensors: Sequence[Tensor], needed: Sequence[bool]
    ) -> tuple[list[Tensor], dict[int, Tensor]]:
        """The same, remembered for the time when it is run again; and what to save beside it.

        That are results with a few numbers for each edge, by the number of their call among what is
        done in blocks: little beside the inputs, and long to compute.
        """
        calls = again.Calls()
        with again.counting(calls):
            results = self.forward(tensors)
        self._ends = calls.ends
        most = _SHARE * sum(t.nbytes for t in tensors if t.is_floating_point())
        unread = self.unread.get(self._key(needed), frozenset())
        known = {
            number: result
            for number, result in calls.of_edges.items()
            if number not in unread and result.nbytes <= most and result.is_floating_point()
        }
        return results, known

    def _key(self, needed: Sequence[bool]) -> tuple[bool, ...]:
        """Of ``unread``, by which tensors and parameters need a gradient."""
        return self.module.training, *needed

    def _again(
        self, saved: Sequence[Saved], needed: Sequence[bool], known: Mapping[int, Saved]
    ) -> tuple[list[GradientEdge], list[GradientEdge | None]]:
        """The same with a graph: the edges of the inputs that are needed, and of the results."""
        key = self._key(needed)
        decoded = {number: one.tensor() for number, one in known.items()}
        calls = again.Calls(self._ends, self.unread.get(key, frozenset()), known=decoded)
        del decoded
        inner = Inner(self.module, calls, self.coding)
        token = torch.zeros((), requires_grad=True)
        inputs = [
            Given.apply(token, inner.given(one)) if need else inner.given(one)
            for one, need in zip(saved, needed, strict=False)
        ]
        with again.counting(calls), saved_tensors_hooks(inner.pack, hooks.unpack):
            results = self.forward(inputs)
        if key not in self.unread:
            self.unread[key] = calls.find_unread(results)
        # Edges, and not tensors: what the graph does not hold is gone from here on.
        return (
            [get_gradient_edge(t) for t, need in zip(inputs, needed, strict=False) if need],
            [get_gradient_edge(out) if out.requires_grad else None for out in results],
        )

    def backward(
        self,
        saved: Sequence[Saved],
        values: Sequence[Tensor],
        needed: Sequence[bool],
        gradients: Sequence[Tensor | None],
        known: Mapping[int, Saved],
        device: torch.device,
    ) -> list[Tensor | None]:
        """The gradients of tensors and parameters, where they are needed."""
        give_back(device)
        with stand_ins(self.module, values) as parameters, self.surroundings.again():
            sources, ends = self._again(saved, needed, known)
            pairs = [
                (edge, gradient)
                for edge, gradient in zip(ends, gradients, strict=True)
                if gradient is not None and edge is not None
            ]
            wanted = [p for p, need in zip(parameters, needed[len(saved) :], strict=True) if need]
            found: list[Tensor | None] = [None] * len(needed)
            if pairs and (sources or wanted):
                inputs: list[Any] = [*sources, *wanted]
                added = torch.autograd.grad(
                    [edge for edge, _ in pairs],
                    inputs,
                    [gradient for _, gradient in pairs],
                    allow_unused=True,
                )
                places = [i for i, need in enumerate(needed) if need]
                for i, gradient in zip(places, added, strict=True):
                    found[i] = gradient
        return found


class _Recompute(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, call: _Call, count: int, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.call, ctx.count = call, count
        ctx.device = tensors[0].device
        ctx.set_materialize_grads(False)
        results, known = call.first(tensors[:count], ctx.needs_input_grad[2:])
        ctx.known = [*known]
        call.named |= {f"edges.{i}": result for i, result in enumerate(known.values())}
        # Through the hooks of whoever compresses what is saved.
        ctx.save_for_backward(*tensors, *known.values())
        ctx.mark_non_differentiable(*(t for t in results if not _has_gradient(t)))
        return tuple(results)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        n, held = ctx.count, hooks.saved_by(ctx)
        if held is None:  # hooks of others stand between
            kept = "an input of a layer that is computed again"
            held = [Saved(Context(Kept(tensor, kept))) for tensor in ctx.saved_tensors]
        needed = ctx.needs_input_grad[2:]
        values = [one.tensor() for one in held[n : len(needed)]]
        known = dict(zip(ctx.known, held[len(needed) :], strict=True))
        found = ctx.call.backward(held[:n], values, needed, gradients, known, ctx.device)
        return (None, None, *found)


def _flat(args: Any, kwargs: Any) -> tuple[tuple[Tensor, ...], list[Any], TreeSpec]:
    leaves, spec = tree_flatten((args, kwargs))
    tensors = tuple(leaf for leaf in leaves if isinstance(leaf, Tensor))
    others = [Tensor if isinstance(leaf, Tensor) else leaf for leaf in leaves]
    for other in others:
        if any(t.requires_grad for t in tensors_in(other)):
            raise CannotRecompute(f"gets tensors that learn inside a {type(other).__name__}")
    return tensors, others, spec


def _named(inner: Callable[..., Any], args: Any, kwargs: Any) -> dict[str, Tensor]:
    """The tensors among the arguments, each by a name."""
    found: dict[str, Tensor] = {}
    for name, value in inspect.signature(inner).bind(*args, **kwargs).arguments.items():
        leaves = [leaf for leaf in tree_flatten(value)[0] if isinstance(leaf, Tensor)]
        found |= {name if len(leaves) == 1 else f"{name}.{i}": t for i, t in enumerate(leaves)}
    return found


def _has_gradient(tensor: Tensor) -> bool:
    return tensor.is_floating_point() or tensor.is_complex()
