r"""How much the error of each slot moves the gradient: of all slots at once.

GACT (ICML 2022, Algorithm 1) runs a step again for each slot l, with other noise in that slot
alone, and takes how far the gradient moves for its sensitivity :math:`c_l`. That is one forward and
backward a slot. Here one backward tells all of them. A slot that is decoded in another width
changes what its operation hands on in backward by some :math:`u_l`, which is seen by running that
operation's backward once more; how much of :math:`u_l` reaches the parameters, the tangents of
:mod:`gact_graph.adaptive.tangents` tell:

.. math::
    c_l = \frac{1}{S(b_l) \lVert g \rVert^2} \Bigl(
        \sum_x \sum_i E[\dot{x}_i^2] u_{l,x,i}^2 + \sum_p \lVert u_{l,p} \rVert^2 \Bigr)

over the inputs x of the operation that are made by others and its parameters p; errors of elements
are taken for independent. Where an operation makes a few numbers of many channels (attention
scores), the change is also followed on through these, and the mean of both is taken. A
normalisation spreads the error of each element over its whole slice (a channel, say), in proportion
to the elements: there, the square is that of a slice's sum. The other width is finer, and
training's is made of it: so :math:`u_l` is the error itself, with its bias, and not only its
variance. Where the noise moves elements past a kink (GATv2's leaky_relu), that is up to three times
what Algorithm 1 finds.

It costs two forwards and two backwards, and what operations run once more, whatever the number of
slots.
"""

from __future__ import annotations

import functools
import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.graph import Node, saved_tensors_hooks

from gact_graph.adaptive.allocator import noise
from gact_graph.adaptive.replay import Forward, Recording, Replayed
from gact_graph.adaptive.tangents import Tangents
from gact_graph.capture.session import Session
from gact_graph.codecs.compared import Widths
from gact_graph.codecs.reads import Slices
from gact_graph.support.current import unpack
from gact_graph.support.graph import nodes_before, saved_by_node

_FOLLOWED = 32
"""Operations that the change which one operation makes is followed through, at most."""

_NARROW = 8
"""Elements of a narrow tensor for each entry of its first dimension, at most."""

Edge = tuple[Node, int]
"""A tensor in the graph: the node that made it, and which of its outputs it is."""

Open = Callable[[nn.Module, Any, Widths | None], AbstractContextManager[Session]]
"""Opens the session of a forward that is run again, from the replica of the model, its arguments,
and the widths that contexts are had in, if more than one."""


class Measured(NamedTuple):
    """What one step told.

    Attributes:
        sensitivities: c_l by slot, over the squared length of the gradient.
        error: How far the gradient is from the one with all slots in their fine width, over the
            length of that.
        explained: The same, by the sensitivities alone.
    """

    sensitivities: dict[str, float]
    error: float
    explained: float


class Measurement:
    """Measures all slots on one recorded step, in two parts that may be run at different times.

    Args:
        recording: The step.
        open_session: Opens the session of a forward that is run again.
        seed: Of the signs by which parameters are moved. Measurements with other seeds are off in
            other ways, so that smoothing them helps.
    """

    def __init__(self, recording: Recording, open_session: Open, seed: int = 0) -> None:
        self.recording = recording
        self._seed = seed
        self._open = open_session
        self._tangents = Tangents()
        self._step = 0.0
        # Both forwards have the same parameters, whatever the optimizer does between them.
        self._parameters: list[Tensor] = []

    def run_moved(self, forward: Forward) -> None:
        """The first part: a forward whose parameters are moved, for the tangents."""
        self._parameters = [p.detach().clone() for p in self.recording.learning]
        self._step = _step(self._parameters)
        generator = torch.Generator().manual_seed(self._seed)
        moved = [p + self._step * _signs(generator, p) for p in self._parameters]
        try:
            with self.recording.rerun(forward, self._follow_moved, moved):
                pass
        finally:
            self._tangents.end_moved()

    def run_as_it_was(self, forward: Forward) -> Measured | None:
        """The second part: a forward and two backwards. None where the gradient is not finite.

        Args:
            forward: Gives the model's own forward, as that of a replica.
        """
        widths = Widths()
        see = functools.partial(self._tangents.see_unmoved, step=self._step)

        @contextmanager
        def capture(replica: nn.Module, inputs: Any) -> Iterator[Session]:
            with self._open(replica, inputs, widths) as session:
                session.trace.before = see
                yield session

        values, self._parameters = self._parameters, []
        with self.recording.rerun(forward, capture, values) as replayed:
            del values
            errors = _Errors(widths, self._tangents, replayed.parameters)
            narrow: dict[int, Tensor] = {}
            widths.all_fine = False
            with errors.watching(replayed):
                replayed.backward(narrow.__setitem__, keep_graph=True)
            widths.all_fine = True
            distance = _Distance(narrow)
            replayed.backward(distance.receive)
        length = distance.length
        if not (0 < length < math.inf and distance.squared < math.inf):
            return None
        squared = {slot: errors.squared(slot) / length for slot in sorted(widths.slots)}
        found = {slot: value / noise(widths.slots[slot]) for slot, value in squared.items()}
        return Measured(
            {slot: value for slot, value in found.items() if value < math.inf},
            math.sqrt(distance.squared / length),
            math.sqrt(sum(squared.values())),
        )

    @contextmanager
    def _follow_moved(self, replica: nn.Module, inputs: Any) -> Iterator[Session]:
        with (
            self._open(replica, inputs, None) as session,
            saved_tensors_hooks(_keep_nothing, _read_nothing),
        ):
            session.trace.before = self._tangents.see_moved
            yield session


@dataclass
class _Arrivals:
    """Where changes of backward arrive that begin at one or several operations.

    Attributes:
        at_inputs: By the number of elements of an operation's input, what arrived there. An error
            that several operations read (an exponential, and the division by its sum) moves the
            gradient as the sum of what it does to each.
        of_parameters: The squared change of the parameters that it reaches before any such input.
        is_narrow: Whether one of these inputs is narrow.
    """

    at_inputs: dict[int, _AtInputs] = field(default_factory=dict)
    of_parameters: float = 0.0
    is_narrow: bool = False

    def update(self, other: _Arrivals) -> None:
        for numel, more in other.at_inputs.items():
            known = self.at_inputs.get(numel)
            self.at_inputs[numel] = more if known is None else known.plus(more)
        self.of_parameters += other.of_parameters


class _AtInputs(NamedTuple):
    """Changes at inputs of one number of elements.

    Attributes:
        products: The change of each sampled element times its tangent [S], summed over inputs.
        single: The sum of their squares, as if each operation that read the error were alone.
        expected: The same by the mean squares of the tangents, input by input.
    """

    products: Tensor
    single: float
    expected: float

    def plus(self, other: _AtInputs) -> _AtInputs:
        """What arrives there if both operations read the error."""
        return _AtInputs(
            self.products + other.products,
            self.single + other.single,
            self.expected + other.expected,
        )

    def squared(self, numel: int) -> float:
        """How far the changes of all elements move the gradient, squared."""
        if not self.single:
            return 0.0
        # Tangents as drawn tell how far operations cancel, and their mean squares the rest.
        together = _squared(self.products)
        return together / self.single * self.expected * numel / len(self.products)


class _Errors:
    """What errors in single slots change in backward, collected while it runs.

    Tangents of narrow inputs, such as attention scores, depend on few of the signs that were drawn:
    what they tell is far from the mean over all draws. A change there that is followed on, to wide
    inputs and parameters, is that of one draw of the noise. Both are estimates of the same, whose
    deviations have nothing to do with each other, and the mean of both is taken.

    Args:
        widths: Those of the contexts.
        tangents: Of the operations' inputs.
        parameters: Leaves of the graph.
    """

    def __init__(self, widths: Widths, tangents: Tangents, parameters: Sequence[Tensor]) -> None:
        self._widths = widths
        self._tangents = tangents
        self._parameters = {id(parameter) for parameter in parameters}
        # By slot: at the first inputs with tangents, and at the first wide ones.
        self._estimates: dict[str, tuple[_Arrivals, _Arrivals]] = {}
        # Of the node that runs: the slot that is not compared yet, if any, and its fine sketch.
        self._waiting: tuple[list[str], dict[Edge, Tensor]] = [], {}

    @contextmanager
    def watching(self, replayed: Replayed) -> Iterator[None]:
        """Measures during the backward that runs inside."""
        handles = []
        for node in nodes_before(replayed.ends):
            if _hooks_of(node) == {unpack}:
                handles.append(node.register_prehook(functools.partial(self._before, node)))
                handles.append(node.register_hook(functools.partial(self._after, node)))
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def squared(self, slot: str) -> float:
        """How far the slot moves the gradient, squared."""
        estimates = self._estimates.get(slot, ())
        return sum(self._squared(slot, one) for one in estimates) / max(1, len(estimates))

    def _squared(self, slot: str, arrivals: _Arrivals) -> float:
        found = arrivals.of_parameters
        for numel, at_inputs in arrivals.at_inputs.items():
            squared = at_inputs.squared(numel)
            found += squared
            slices = self._widths.slices.get(slot)
            if slices is not None and math.prod(slices[0]) == numel:
                product = at_inputs.products.double()
                indices = self._tangents.sampled_indices(numel, product.device)
                scale = numel / len(product)
                found += squared * scale * _coherence(product, indices, slices)
        return found

    def _before(self, node: Node, gradients: Sequence[Tensor | None]) -> None:
        """One slot after the other becomes narrow. The last of them :meth:`_after` compares with
        what the node hands on itself, which is one run less."""
        self._widths.read.clear()
        self._widths.all_fine = True
        try:
            fine = self._sketch(node, gradients)
        finally:
            self._widths.all_fine = False
        slots = sorted(self._widths.read)
        try:
            while len(slots) > 1:
                slot = slots.pop()
                self._widths.fine = {*slots}
                narrow = self._sketch(node, gradients)
                self._compare(slot, narrow, fine)
                fine = narrow
        finally:
            self._widths.fine = set()
        self._waiting = slots, fine

    def _after(
        self, node: Node, results: Sequence[Tensor | None], gradients: Sequence[Tensor | None]
    ) -> None:
        (slots, fine), self._waiting = self._waiting, ([], {})
        for slot in slots:
            self._compare(slot, self._samples(node, results), fine)

    def _compare(self, slot: str, narrow: dict[Edge, Tensor], fine: dict[Edge, Tensor]) -> None:
        # Not in place: what a node hands on may be the very gradient that it was given.
        changes = {edge: fine[edge] - one for edge, one in narrow.items() if edge in fine}
        near = self._follow({**changes}, beyond_narrow=False)
        far = self._follow(changes, beyond_narrow=True) if near.is_narrow else near
        estimates = self._estimates.setdefault(slot, (_Arrivals(), _Arrivals()))
        estimates[0].update(near)
        estimates[1].update(far)

    def _sketch(self, node: Node, gradients: Sequence[Tensor | None]) -> dict[Edge, Tensor]:
        """What the node hands on if it runs once more, as :meth:`_samples` gives it."""
        return self._samples(node, _call(node, gradients))

    def _samples(self, node: Node, results: Sequence[Tensor | None]) -> dict[Edge, Tensor]:
        """What the node hands on, by edge: samples where wide tangents are known, else all."""
        found: dict[Edge, Tensor] = {}
        for (following, output), result in zip(node.next_functions, results, strict=True):
            if following is None or result is None:
                continue
            edge = following, output
            result = result.to_dense() if result.is_sparse else result
            result = result.sum_to_size(_shape(edge))
            tangent = self._tangents.at(*edge)
            if tangent is not None and not _is_narrow(edge):
                result = tangent.sample(result)
            found[edge] = found[edge] + result if edge in found else result
        return found

    def _follow(self, changes: dict[Edge, Tensor], beyond_narrow: bool) -> _Arrivals:
        """Follows changes, as :meth:`_sketch` gives them, to parameters and known tangents.

        Args:
            changes: By the edges of the graph that they reach. They are let go one by one.
            beyond_narrow: Whether they are followed through narrow inputs, too.
        """
        arrivals = _Arrivals()
        waiting: dict[Node, dict[int, Tensor]] = defaultdict(dict)
        of_inputs: dict[Edge, Tensor] = {}
        of_parameters: dict[Node, Tensor] = {}
        left = _FOLLOWED
        while True:
            while changes:
                edge, change = changes.popitem()
                node, output = edge
                tangent, is_narrow = self._tangents.at(node, output), _is_narrow(edge)
                can_go_on = left > 0 and _hooks_of(node) <= {unpack}
                if tangent is not None and not (is_narrow and beyond_narrow and can_go_on):
                    sample = tangent.sample(change) if is_narrow else change
                    of_inputs[edge] = of_inputs[edge] + sample if edge in of_inputs else sample
                    arrivals.is_narrow |= is_narrow
                elif hasattr(node, "variable"):
                    if id(node.variable) in self._parameters:
                        known = of_parameters.get(node)
                        of_parameters[node] = change if known is None else known + change
                elif can_go_on:
                    inputs = waiting[node]
                    inputs[output] = inputs[output] + change if output in inputs else change
            if not waiting:
                arrivals.of_parameters = sum(map(_squared, of_parameters.values()))
                arrivals.at_inputs = self._at_inputs(of_inputs)
                return arrivals
            # In the order of backward: by then, all that reaches a node is there.
            node = max(waiting, key=lambda one: one._sequence_nr())
            given = waiting.pop(node)
            left -= 1
            changes = self._sketch(node, [given.get(i) for i in range(len(node._input_metadata))])

    def _at_inputs(self, changes: dict[Edge, Tensor]) -> dict[int, _AtInputs]:
        """By number of elements, of sampled changes [S] of inputs."""
        products: dict[int, Tensor] = {}
        expected: dict[int, float] = defaultdict(float)
        for edge, change in changes.items():
            tangent = self._tangents.at(*edge)
            assert tangent is not None
            product = change * tangent.values
            numel = tangent.numel
            products[numel] = products[numel] + product if numel in products else product
            expected[numel] += float(change.square().dot(tangent.squares))
        return {
            numel: _AtInputs(product, _squared(product), expected[numel])
            for numel, product in products.items()
        }


def _coherence(product: Tensor, indices: Tensor | None, slices: Slices) -> float:
    """What pairs of elements of one slice add to the square of its sum, over the sum of the squares
    of its elements: the mean over slices, at least 0.

    Slices count alike, although few may hold most of the error: by these alone, what one draw of
    signs tells would be far from the mean over all draws.

    Args:
        product: Sampled elements [S].
        indices: Which elements they are; None for all of them in order.
        slices: The slices.
    """
    shape, dims = slices
    kept = [1 if d in dims else n for d, n in enumerate(shape)]
    numbers = torch.arange(math.prod(kept), device=product.device).view(kept).expand(shape)
    numbers = numbers.reshape(-1) if indices is None else numbers.take(indices)
    sums = product.new_zeros(2, math.prod(kept))
    sums.index_add_(1, numbers, torch.stack([product, product.square()]))
    squares = sums[1]
    pairs = (sums[0].square() - squares)[squares > 0] / squares[squares > 0]
    return max(0.0, float(pairs.mean())) if len(pairs) else 0.0


class _Distance:
    """How far gradients are from the first ones, without holding them."""

    def __init__(self, first: dict[int, Tensor]) -> None:
        self._first = first
        self.squared = 0.0
        self.length = 0.0

    def receive(self, index: int, gradient: Tensor) -> None:
        first = self._first.pop(index, None)
        self.squared += _squared(gradient if first is None else first - gradient)
        self.length += _squared(gradient)


def _call(node: Any, gradients: Sequence[Tensor | None]) -> tuple[Tensor | None, ...]:
    """What a node of the graph hands on, an item for each of its ``next_functions``."""
    if not hasattr(node, "needs_input_grad"):
        results = node(*gradients)
        return results if isinstance(results, tuple) else (results,)
    # A function written in Python gives an item for each argument, tensor or not.
    results = node.apply(*gradients)
    results = results if isinstance(results, tuple) else (results,)
    needed = (r for r, need in zip(results, node.needs_input_grad, strict=False) if need)
    return tuple(None if node is None else next(needed) for node, _ in node.next_functions)


def _hooks_of(node: Node) -> set[Any]:
    """The hooks that unpack what the node saved.

    Those of ``torch.utils.checkpoint`` can be asked once only.
    """
    return {getattr(saved, "unpack_hook", None) for saved in saved_by_node(node)} - {None}


def _shape(edge: Edge) -> Sequence[int]:
    """Of the tensor that this edge of the graph belongs to."""
    node, output = edge
    shape: Sequence[int] = (
        node.variable.shape if hasattr(node, "variable") else node._input_metadata[output].shape
    )
    return shape


def _is_narrow(edge: Edge) -> bool:
    """Whether the tensor has no more than a few elements for each node or edge."""
    return math.prod(_shape(edge)[1:]) <= _NARROW


def _signs(generator: torch.Generator, like: Tensor) -> Tensor:
    signs = torch.randint(2, like.shape, generator=generator, dtype=torch.int8, device="cpu")
    signs.mul_(2).sub_(1)
    return signs.to(like.device, like.dtype)


def _step(parameters: Sequence[Tensor]) -> float:
    """How far to move each parameter: little, but far above what rounding moves."""
    square = sum(map(_squared, parameters)) / max(1, sum(p.numel() for p in parameters))
    kinds = {p.dtype for p in parameters}
    if torch.is_autocast_enabled("cpu") or torch.is_autocast_enabled("cuda"):
        kinds.add(torch.bfloat16)
    precision = max(torch.finfo(kind).eps for kind in kinds)
    return math.sqrt(square * precision) or math.sqrt(precision)


def _squared(tensor: Tensor) -> float:
    values = tensor.coalesce().values() if tensor.is_sparse else tensor
    return float(torch.linalg.vector_norm(values, dtype=torch.float64)) ** 2


def _keep_nothing(tensor: Tensor) -> None:
    return None


def _read_nothing(kept: None) -> Tensor:
    raise AssertionError("Expected no backward of a forward that is run for its values alone")
