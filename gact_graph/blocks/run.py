"""The edge work of a layer, one block of destinations at a time, in forward and in backward.

Each block is computed again in backward from tensors of nodes, with the random numbers it had in
forward: nothing with a row for each arc and the width of a message is alive for more than a block.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch_geometric.nn import MessagePassing
from torch_geometric.nn.aggr import SumAggregation

from gact_graph import again
from gact_graph.blocks.arguments import Arguments, Use, add_rows, rows_of
from gact_graph.blocks.coded import CodedRows, saved_tensors
from gact_graph.blocks.order import Block, Order
from gact_graph.heap import give_back
from gact_graph.stand_ins import learning, stand_ins
from gact_graph.surroundings import Surroundings

Work = Callable[[MessagePassing, dict[str, Any]], Tensor]


def messages(module: MessagePassing, given: dict[str, Any]) -> Tensor:
    """``message`` alone: [arcs, ...]."""
    return module.message(**module.inspector.collect_param_data("message", given))


def is_sum(module: MessagePassing) -> bool:
    """Whether ``propagate`` only adds messages up, so that their gradient is that of the sum."""
    kind = type(module)
    plain = all(
        getattr(kind, name) is getattr(MessagePassing, name) and name not in vars(module)
        for name in ("aggregate", "update")
    )
    return plain and type(module.aggr_module) is SumAggregation


def propagate(module: MessagePassing, given: dict[str, Any]) -> Tensor:
    """``message``, ``aggregate`` and ``update``: [rows, ...]."""
    collect = module.inspector.collect_param_data
    out = messages(module, given)
    out = module.aggregate(out, **collect("aggregate", given))
    return module.update(out, **collect("update", given))


def edge_update(module: MessagePassing, given: dict[str, Any]) -> Tensor:
    """``edge_update``: [arcs, ...]."""
    return module.edge_update(**module.inspector.collect_param_data("edge_update", given))


def work_again(module: MessagePassing, work: Work) -> Work:
    """What is computed again in backward: a sum needs not be taken to have its gradient."""
    return messages if work is propagate and is_sum(module) else work


@dataclass
class Run:
    """One call of a layer's ``propagate`` or ``edge_updater``, without its tensors.

    Attributes:
        module: The layer.
        work: What is done for each block.
        arguments: Their uses; the tensors come separately.
        order: Of the arcs.
        size: Arcs and rows of a block.
        of_edges: Whether the result has a row for each arc, else one for each destination.
        kept: Attributes in which the layer leaves a tensor of arcs, as some do with attention.
        unread: Places of the tensors whose values backward does not read.
        thrifty: Whether the heap's free memory counts beside what is saved.
    """

    module: MessagePassing
    work: Work
    arguments: Arguments
    order: Order
    size: int
    of_edges: bool
    kept: tuple[str, ...]
    unread: frozenset[int]
    thrifty: bool
    surroundings: Surroundings = field(init=False)

    @property
    def blocks(self) -> list[Block]:
        return self.order.blocks(self.size)

    def __call__(self) -> Tensor:
        """The result, with a graph if one is needed; sets the attributes of ``kept``."""
        tensors = self.arguments.tensors
        self.surroundings = Surroundings({t.device.type for t in tensors})
        parameters = learning(self.module)
        # What autograd holds must hold no tensor past the hooks on what it saves.
        self.arguments = replace(self.arguments, tensors=())
        calls = again.current()
        shapes_only = calls is not None and calls.next_is_unread
        if torch.is_grad_enabled() and any(t.requires_grad for t in (*tensors, *parameters)):
            with nullcontext() if calls is None else calls.one():
                results = _Blocked.apply(self, shapes_only, len(tensors), *tensors, *parameters)
        else:
            results = self.forward(tensors, shapes_only)
        if calls is not None:
            calls.add(results[0])
        for name, kept in zip(self.kept, results[1:], strict=True):
            setattr(self.module, name, kept)
        return results[0]

    @torch.no_grad()
    def forward(self, tensors: Sequence[Tensor], shapes_only: bool = False) -> tuple[Tensor, ...]:
        """The result and what is kept, without a graph; or zeros in their place."""
        results: list[Tensor] = []
        for block in self.blocks[:1] if shapes_only else self.blocks:
            given, _ = self.arguments.part(tensors, self.order, block)
            for i, part in enumerate(self._outputs(given, self.work)):
                if len(results) == i:
                    length = self.order.arcs if self._of_edges(i) else self.order.rows
                    shape = length, *part.shape[1:]
                    empty = part.new_zeros(()).expand if shapes_only else part.new_empty
                    results.append(empty(shape))
                if not shapes_only:
                    self._write(results[i], i, block, part)
        return tuple(results)

    def backward(
        self,
        tensors: Sequence[Tensor | CodedRows],
        values: Sequence[Tensor],
        learn: Sequence[bool],
        of_parameters: Sequence[bool],
        gradients: Sequence[Tensor | None],
    ) -> list[Tensor | None]:
        """The gradients of the tensors and of the parameters, where they are needed."""
        n, device = len(tensors), tensors[0].device
        # What a layer's edge_update used, its propagate uses again, and the other way round.
        thrifty = self.thrifty and not self.of_edges
        if thrifty:
            give_back(device)
        found: list[Tensor | None] = [None] * (n + len(values))
        work = work_again(self.module, self.work)
        summed = work is not self.work
        with stand_ins(self.module, values) as parameters, self.surroundings.again():
            wanted = [i for i, needed in enumerate(of_parameters) if needed]
            for block in self.blocks:
                given, leaves = self.arguments.part(tensors, self.order, block, learn)
                outputs = self._outputs(given, work)
                pairs = [
                    (out, self._read(gradient, i, block))
                    for i, (out, gradient) in enumerate(zip(outputs, gradients, strict=True))
                    if gradient is not None and out.requires_grad
                ]
                if summed and pairs and pairs[0][0] is outputs[0]:
                    out, gradient = pairs[0]
                    pairs[0] = out, rows_of(gradient, given["index"]).expand_as(out)
                if not pairs:
                    continue
                added = torch.autograd.grad(
                    [out for out, _ in pairs],
                    [*(leaf for _, leaf in leaves), *(parameters[i] for i in wanted)],
                    [gradient for _, gradient in pairs],
                    allow_unused=True,
                )
                for (use, _), part in zip(leaves, added, strict=False):
                    if part is not None:
                        total = found[use.place]
                        if total is None:
                            total = found[use.place] = _zeros(tensors[use.place])
                        self._add(total, use, block, given["edge_index_j"], part)
                for i, part in zip(wanted, added[len(leaves) :], strict=True):
                    known = found[n + i]
                    # What no block uses has no gradient, as in stock autograd.
                    if part is not None:
                        found[n + i] = part if known is None else known.add_(part)
        if thrifty:
            give_back(device)
        return found

    def _outputs(self, given: dict[str, Any], work: Work) -> list[Tensor]:
        return [work(self.module, given), *(getattr(self.module, name) for name in self.kept)]

    def _of_edges(self, output: int) -> bool:
        return self.of_edges or output > 0

    def _write(self, result: Tensor, output: int, block: Block, part: Tensor) -> None:
        if not self._of_edges(output):
            result[block.row : block.row_end] = part
            return
        places = self.order.places(block)
        if isinstance(places, slice):
            result[places] = part
        else:
            result.index_copy_(0, places.long(), part)

    def _read(self, gradient: Tensor, output: int, block: Block) -> Tensor:
        if self._of_edges(output):
            return rows_of(gradient, self.order.places(block))
        return gradient[block.row : block.row_end]

    def _add(
        self, total: Tensor, use: Use, block: Block, sources: Tensor, gradient: Tensor
    ) -> None:
        if use.level == "source":
            add_rows(total, sources, gradient)
        elif use.level == "edge":
            add_rows(total, self.order.places(block), gradient)
        elif use.level == "whole":
            total += gradient
        else:
            total[block.row : block.row_end] += gradient


class _Blocked(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, run: Run, shapes_only: bool, count: int, *tensors: Tensor
    ) -> tuple[Tensor, ...]:
        ctx.run, ctx.count = run, count
        ctx.set_materialize_grads(False)
        ctx.shapes = {i: (tensors[i].shape, tensors[i].new_ones(())) for i in run.unread}
        # Through the hooks of whoever compresses what is saved.
        ctx.save_for_backward(*(t for i, t in enumerate(tensors) if i not in run.unread))
        return run.forward(tensors[:count], shapes_only)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        needed, n = ctx.needs_input_grad[3:], ctx.count
        kept = [i for i in range(len(needed)) if i not in ctx.shapes]
        read = iter(saved_tensors(ctx, ctx.run.arguments.uses, kept))
        saved = [
            ctx.shapes[i][1].expand(ctx.shapes[i][0]) if i in ctx.shapes else next(read)
            for i in range(len(needed))
        ]
        found = ctx.run.backward(saved[:n], saved[n:], needed[:n], needed[n:], gradients)
        return (None, None, None, *found)


def _zeros(tensor: Tensor | CodedRows) -> Tensor:
    return torch.zeros(tensor.shape, dtype=tensor.dtype, device=tensor.device)
