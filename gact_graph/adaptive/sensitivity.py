r"""How much the noise of each slot moves the gradient: all slots in one backward, the user's own.

GACT (ICML 2022, Algorithm 1) runs a step again for each slot l, with other noise in that slot
alone, and takes how far the gradient moves for its sensitivity :math:`c_l`. Here no step runs
again. In a step that is measured, quantized contexts wait in a finer width, and backward decodes
that. When an operation of backward has run, the same operation runs again by itself:

- with one slot decoded in the width of training. The difference is the slot's error :math:`u_l` in
  the gradients of the operation's inputs and parameters;
- on the error :math:`e` that the operations before have left in its incoming gradient. Backward is
  linear in gradients, so this carries the error on, and tells by how much the operation magnifies
  its square: :math:`\lVert J e \rVert^2 / \lVert e \rVert^2`.

What one operation hands on to the next are all errors together, :math:`e = J e' + \sum_l u_l`;
what reaches the parameters is the error of the gradient, to first order. The part of a single slot
follows when backward has ended, from the parameters back to the outputs: the square of an error at
a parameter counts once, and at any other tensor as much as the operations from there on magnify it,

.. math::
    c_l = \frac{1}{S(b_l) \lVert g \rVert^2} \Bigl(
        \sum_p \lVert u_{l,p} \rVert^2 + \sum_x a_x \lVert u_{l,x} \rVert^2 \Bigr), \qquad
    a_x = \sum_p \frac{\lVert J_p e_x \rVert^2}{\lVert e_x \rVert^2}
        + \sum_{x'} a_{x'} \frac{\lVert J_{x'} e_x \rVert^2}{\lVert e_x \rVert^2} .

Only operations of PyTorch and of this library run again: neither the model's code nor a user's
hook or ``autograd.Function`` does.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd import Variable
from torch.autograd.graph import Node

from gact_graph.adaptive.allocator import noise
from gact_graph.codecs.compared import Widths
from gact_graph.ops.quantize import DTYPES, Packed, pack
from gact_graph.support.current import unpack
from gact_graph.support.graph import ends_of, nodes_before, saved_by_node


class Measured(NamedTuple):
    """Sensitivities of one step.

    Attributes:
        sensitivities: c_l by slot, over the squared length of the gradient.
        error: Length of the gradient's error with the bits in force, over that of the gradient.
        explained: The same, by the sensitivities alone.
    """

    sensitivities: dict[str, float]
    error: float
    explained: float


class Edge(NamedTuple):
    """A tensor in the graph of a step: an input of the operation that made it, in backward.

    Attributes:
        node: The operation's number.
        input: Which of its outputs the tensor is.
        shape: The tensor's.
        dtype: The tensor's.
        parameter: Whether the tensor is a leaf whose gradient counts.
    """

    node: int
    input: int
    shape: torch.Size
    dtype: torch.dtype
    parameter: bool


_MANY = 1 << 20
"""Elements of an error from which on it waits in 4 bits an element."""

_RUN = 1 << 10
"""Elements whose squares are added up in their own precision."""

Outcome = Measured | Exception | None
"""None where the gradient was zero or not finite; an exception that an operation raised when it ran
again."""

Gradients = Sequence[Tensor | None]


class Measurement:
    """Measures all slots in the backward of one forward.

    The hooks on the graph hold the measurement, and the measurement no node of the graph: both go
    with the graph if no backward comes.

    Args:
        done: Called when backward has ended.

    Attributes:
        widths: For the session that captures the forward.
    """

    def __init__(self, done: Callable[[Outcome], None]) -> None:
        self.widths = Widths()
        self._done = done
        self._edges: list[list[Edge | None]] = []
        self._uses: dict[int, int] = {}
        self._order: list[int] = []
        self._ended = False
        self._error: Exception | None = None
        # On their way: errors by node and input, and of parameters parts of gradients and errors.
        self._errors: dict[tuple[int, int], list[Tensor | Packed]] = {}
        self._parameters: dict[int, tuple[list[Tensor], list[Tensor]]] = {}
        self._squared_gradient = 0.0
        self._squared_error = 0.0
        # Squared errors of slots at edges, and by node how much each edge magnifies.
        self._own: dict[str, list[tuple[Edge, float]]] = {}
        self._magnified: dict[int, list[tuple[Edge, float]]] = {}
        self._not_run: set[str] = set()

    def watch(self, outputs: Iterable[Tensor], inputs: Iterable[Tensor]) -> None:
        """Hooks on to the graph of a forward that has ended.

        Args:
            outputs: What the forward returned.
            inputs: Its arguments. Their gradients do not count.
        """
        nodes = [*nodes_before(ends_of(outputs))]
        numbers = {node: number for number, node in enumerate(nodes)}
        arguments = {id(tensor) for tensor in inputs}

        def edge(node: Node | None, index: int) -> Edge | None:
            if node is None:
                return None
            number = numbers[node]
            variable = getattr(node, "variable", None)
            if variable is None:
                tensor = node._input_metadata[index]
                return Edge(number, index, torch.Size(tensor.shape), tensor.dtype, False)
            self._uses[number] = self._uses.get(number, 0) + 1
            counts = id(variable) not in arguments
            return Edge(number, index, variable.shape, variable.dtype, counts)

        for number, node in enumerate(nodes):
            self._edges.append([edge(*following) for following in node.next_functions])
            if self._edges[-1]:
                given = number, _can_run_again(node)
                node.register_prehook(functools.partial(self._before, *given))
                node.register_hook(functools.partial(self._after, *given))

    def _before(self, number: int, can_run_again: bool, gradients: Gradients) -> None:
        """A node is about to run: carries on the error of what it gets, the first time."""
        if self._ended or number in self._magnified:
            return
        if not self._order:
            Variable._execution_engine.queue_callback(self._end)
        self._order.append(number)
        self._magnified[number] = []
        with self._measuring():
            if can_run_again:
                self._carry(number, gradients)
        self.widths.read.clear()

    def _after(
        self, number: int, can_run_again: bool, results: Gradients, gradients: Gradients
    ) -> None:
        """A node has run: adds the errors that it made, and hands all on to the next nodes."""
        if self._ended or self._order[-1:] != [number]:
            return
        with self._measuring():
            results = [*map(_as, self._edges[number], results)]
            slots = sorted(self.widths.read)
            if not can_run_again:
                self._not_run.update(slots)
                self._guess(number, results, gradients)
            elif slots:
                # What waited for other processes is compared with what does not.
                alone = _alone(torch._C._current_autograd_node())
                fine = results if alone is None else self._run_again(number, gradients)
                for slot in slots:
                    self._measure(number, slot, fine, gradients)
            for edge, result in zip(self._edges[number], results, strict=True):
                if edge is not None and edge.parameter and result is not None:
                    self._parameters.setdefault(edge.node, ([], []))[0].append(result)
                    self._sum_up(edge.node, self._uses[edge.node])

    @contextmanager
    def _measuring(self) -> Iterator[None]:
        """What an operation raises inside ends the measurement, and not the user's backward.

        It is told of when backward has ended: where backward itself raises, that says it all.
        """
        try:
            with torch.no_grad():
                yield
        except Exception as error:  # of any kind: it was not made to run twice
            self._ended = True
            self._error = error.with_traceback(None)  # whose frames hold tensors

    def _run_again(self, number: int, gradients: Gradients) -> list[Tensor | None]:
        found = [*_run_again(torch._C._current_autograd_node(), gradients)]
        for place, edge in enumerate(self._edges[number]):  # each is let go before the next
            found[place] = _as(edge, found[place])
        return found

    def _carry(self, number: int, gradients: Gradients) -> None:
        """Runs the node on the errors of its incoming gradients, if there are any."""
        errors = [self._take_error(number, i) for i in range(len(gradients))]
        total = _sum_of_squares(errors)
        if not total:
            return
        pairs = zip(errors, gradients, strict=True)
        given = [_zeros(gradient) if error is None else error for error, gradient in pairs]
        del errors
        self._carried(number, self._run_again(number, given), total)

    def _guess(self, number: int, results: Gradients, gradients: Gradients) -> None:
        """As if errors kept their size beside the gradient, and lost their direction."""
        total = _sum_of_squares([self._take_error(number, i) for i in range(len(gradients))])
        length = _sum_of_squares(gradients)
        if total and length:
            share = math.sqrt(total / length)
            carried = [None if r is None else _with_random_signs(r) * share for r in results]
            self._carried(number, carried, total)

    def _carried(self, number: int, errors: Gradients, total: float) -> None:
        """Takes the errors that a node made of errors whose squares are ``total``."""
        for edge, error in zip(self._edges[number], errors, strict=True):
            if edge is not None and error is not None:
                self._magnified[number].append((edge, _squared(error) / total))
                self._add_error(edge, error)

    def _measure(self, number: int, slot: str, results: Gradients, gradients: Gradients) -> None:
        """Runs a node with one slot narrow, beside the results with all of them fine."""
        self.widths.narrow = slot
        try:
            narrow = self._run_again(number, gradients)
        finally:
            self.widths.narrow = None
        narrow.reverse()
        for edge, fine in zip(self._edges[number], results, strict=True):
            own = narrow.pop()
            if edge is None or own is None or fine is None:
                continue
            # Not in place: what a node hands on may be the very gradient that it was given.
            own = own - fine
            squared = _squared(own)
            if squared:
                self._own.setdefault(slot, []).append((edge, squared))
                self._add_error(edge, own)

    def _add_error(self, edge: Edge, error: Tensor) -> None:
        if edge.parameter:
            self._parameters.setdefault(edge.node, ([], []))[1].append(error)
        elif edge.node not in self._uses:
            self._errors.setdefault((edge.node, edge.input), []).append(_small(error))

    def _take_error(self, number: int, index: int) -> Tensor | None:
        """The error of a node's incoming gradient; None for none."""
        found: Tensor | None = None
        for part in self._errors.pop((number, index), ()):
            error = part.unpack() if isinstance(part, Packed) else part
            found = error if found is None else found + error
        return found

    def _sum_up(self, number: int, uses: int) -> None:
        """Counts the gradient of a parameter, once all of its parts are there."""
        gradients, errors = self._parameters.get(number, ([], []))
        if gradients and len(gradients) == uses:
            del self._parameters[number]
            self._squared_gradient += _squared(functools.reduce(torch.add, gradients))
            self._squared_error += _squared(functools.reduce(torch.add, errors)) if errors else 0.0

    def _end(self) -> None:
        """Backward has ended."""
        if self._error is not None:
            self._done(self._error)
        if self._ended:
            return
        self._ended = True
        for number, (gradients, _) in [*self._parameters.items()]:
            self._sum_up(number, len(gradients))
        self._errors.clear()
        length, error = self._squared_gradient, self._squared_error
        self._done(self._measured() if 0 < length < math.inf and error < math.inf else None)

    def _measured(self) -> Measured:
        length, widths = self._squared_gradient, self.widths
        counts: dict[int, float] = {}

        def squared(parts: Iterable[tuple[Edge, float]]) -> float:
            of_tensors = (s * counts.get(edge.node, 0.0) for edge, s in parts)
            return sum(of_tensors) + sum(s for edge, s in parts if edge.parameter)

        for number in reversed(self._order):
            counts[number] = squared(self._magnified[number])
        shares = {s: squared(self._own.get(s, ())) / length for s in sorted(widths.slots)}
        # Nothing is known of an operation that did not run again: its slots count as the worst do.
        worst = max(shares.values(), default=0.0)
        shares |= dict.fromkeys(self._not_run & set(widths.slots), worst)
        found = {slot: share / noise(widths.slots[slot]) for slot, share in shares.items()}
        return Measured(
            {slot: value for slot, value in found.items() if value < math.inf},
            math.sqrt(self._squared_error / length),
            math.sqrt(sum(shares.values())),
        )


def _can_run_again(node: Node) -> bool:
    """Whether a node's backward is PyTorch's or ours, and reads nothing that others restore.

    The hooks of ``torch.utils.checkpoint`` would run a forward, and can be asked once only.
    """
    hooks = {getattr(saved, "unpack_hook", None) for saved in saved_by_node(node)}
    if not hooks <= {None, unpack}:
        return False
    function = getattr(node, "_forward_cls", None)
    if function is None:
        return True
    return bool(function.__module__.startswith(("gact_graph.", "torch._functorch.")))


def _alone(node: Any) -> Callable[..., Any] | None:
    """The backward of a function that runs again without the other processes, if it has one."""
    return getattr(getattr(node, "_forward_cls", None), "alone", None)


def _run_again(node: Any, gradients: Gradients) -> Gradients:
    """What a node hands on, an item for each of its ``next_functions``."""
    if not hasattr(node, "needs_input_grad"):
        results = node(*gradients)
        return results if isinstance(results, tuple) else (results,)
    # A function written in Python gives an item for each argument, tensor or not. The other
    # processes do not run it again: functions that wait for them have another backward.
    alone = _alone(node)
    results = node.apply(*gradients) if alone is None else alone(node, *gradients)
    results = results if isinstance(results, tuple) else (results,)
    needed = (r for r, need in zip(results, node.needs_input_grad, strict=False) if need)
    return tuple(None if node is None else next(needed) for node, _ in node.next_functions)


def _as(edge: Edge | None, gradient: Tensor | None) -> Tensor | None:
    """A gradient in the shape and dtype of its tensor, as autograd itself brings it to them."""
    if edge is None or gradient is None:
        return None
    shaped = gradient if gradient.is_sparse else gradient.sum_to_size(edge.shape)
    return shaped.to(edge.dtype)


def _small(error: Tensor) -> Tensor | Packed:
    """An error as it waits for the next operation: beside the gradient, it should take little."""
    if error.is_sparse or error.dtype not in DTYPES or error.numel() < _MANY:
        return error
    if error.untyped_storage().nbytes() <= error.numel() // 2:  # expanded: 4 bits would take more
        return error
    return pack(error, 4, group_size=256, seed=0)


def _zeros(like: Tensor | None) -> Tensor | None:
    return None if like is None else torch.zeros_like(like)


def _with_random_signs(tensor: Tensor) -> Tensor:
    generator = torch.Generator().manual_seed(tensor.numel())
    signs = (
        torch.randint(2, tensor.shape, generator=generator, dtype=torch.int8, device="cpu")
        .mul_(2)
        .sub_(1)
    )
    return tensor * signs.to(tensor.device)


def _sum_of_squares(tensors: Gradients) -> float:
    return sum(_squared(tensor) for tensor in tensors if tensor is not None)


def _squared(tensor: Tensor) -> float:
    """Return the sum of squares: by runs of elements in the tensor's own precision, without a copy,
    and over all runs in float64."""
    values = tensor.coalesce().values() if tensor.is_sparse else tensor
    values = torch.view_as_real(values) if values.is_complex() else values
    flat = values.reshape(-1)
    end = len(flat) // _RUN * _RUN
    runs = torch.linalg.vector_norm(flat[:end].view(-1, _RUN), dim=1).double()
    rest = torch.linalg.vector_norm(flat[end:].double())
    return float(runs.square().sum() + rest.square())
