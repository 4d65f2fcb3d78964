"""Whether a layer may run in blocks: found out on the first block that it meets."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from gact_graph.blocks.arguments import Arguments, BlockFailed, CannotBlock
from gact_graph.blocks.order import Block, Order
from gact_graph.blocks.work import Work
from gact_graph.stand_ins import attributes_restored, stand_ins
from gact_graph.surroundings import Surroundings

_OVER_ALL = ("batch_norm", "instance_norm", "native_batch_norm")
"""Operations that take statistics over all rows while training."""


def probe(
    module: Any, work: Work, arguments: Arguments, order: Order, block: Block, of_edges: bool
) -> tuple[str, ...]:
    """Run a block and look at what the layer does.

    Returns:
        The attributes in which the layer leaves a tensor with a row for each arc.

    Raises:
        CannotBlock: If it normalises over all arcs, gives no tensor with a row for each node (for
            each arc of ``edge_update``), takes a tensor that was not handed to it, or gives a
            destination another result when its neighbours come in another block.
    """
    surroundings = Surroundings({t.device.type for t in arguments.tensors})
    with attributes_restored(module) as before:
        with stand_ins(module) as parameters, surroundings.again(), _Guard():
            learn = [t.is_floating_point() for t in arguments.tensors]
            given, leaves = arguments.part(arguments.tensors, order, block, learn)
            out = _tried(module, work, given)
        length = (block.arc_end - block.arc) if of_edges else (block.row_end - block.row)
        if not isinstance(out, Tensor) or out.dim() == 0 or out.size(0) != length:
            raise CannotBlock("gives something else than one row for each node or arc")
        kept = _left_behind(module, before, block.arc_end - block.arc)
        results = [out, *(getattr(module, name) for name in kept)]
        _check_leaves(results, [*(leaf for _, leaf in leaves), *parameters])
    _check_separable(module, work, arguments, order, block, of_edges)
    return kept


def _tried(module: Any, work: Work, given: dict[str, Any]) -> Tensor:
    try:
        return work(module, given)
    except (CannotBlock, torch.OutOfMemoryError):
        raise
    except Exception as error:
        # If it is an error of the caller's, the layer will raise it again on all arcs.
        raise BlockFailed(f"fails on a block ({type(error).__name__}: {error})") from error


class _Guard(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(func, "__name__", "")
        if name in _OVER_ALL:
            raise CannotBlock(f"has {name} over all arcs")
        return func(*args, **(kwargs or {}))


def _left_behind(module: nn.Module, before: dict[str, Any], arcs: int) -> tuple[str, ...]:
    found = []
    for name, value in vars(module).items():
        if isinstance(value, Tensor) and value is not before.get(name):
            if value.dim() == 0 or value.size(0) != arcs:
                raise CannotBlock(f"leaves something else than a row for each arc in {name}")
            found.append(name)
    return tuple(found)


def _check_leaves(results: Sequence[Tensor], leaves: Sequence[Tensor]) -> None:
    known = {id(t) for t in leaves}
    stack = [t.grad_fn for t in results if t.grad_fn is not None]
    seen = set(stack)
    while stack:
        node = stack.pop()
        variable = getattr(node, "variable", None)
        if variable is not None and id(variable) not in known:
            raise CannotBlock("takes a tensor that learns and was not handed to propagate")
        for following, _ in node.next_functions:
            if following is not None and following not in seen:
                seen.add(following)
                stack.append(following)


def _check_separable(
    module: nn.Module,
    work: Work,
    arguments: Arguments,
    order: Order,
    block: Block,
    of_edges: bool,
) -> None:
    middle = (block.row + block.row_end) // 2
    if middle == block.row:
        return
    arc = int(order.starts[middle])
    halves = [
        Block(block.row, middle, block.arc, arc),
        Block(middle, block.row_end, arc, block.arc_end),
    ]
    if any(half.arc == half.arc_end for half in halves):
        return
    surroundings = Surroundings({t.device.type for t in arguments.tensors})

    def run(part: Block) -> Tensor:
        given, _ = arguments.part(arguments.tensors, order, part)
        return _tried(module, work, given)

    try:
        with torch.no_grad(), _evaluating(module), attributes_restored(module):
            whole, first, second = run(block), *map(run, halves)
    finally:
        surroundings.restore_random_state()
    apart = torch.cat([first, second])
    scale = whole.abs().max().clamp(min=1e-30)
    if apart.shape != whole.shape or bool(((apart - whole).abs().max() > 1e-2 * scale).any()):
        raise CannotBlock("gives a node another result when its neighbours are in another block")


@contextmanager
def _evaluating(module: nn.Module) -> Iterator[None]:
    modes = [(part, part.training) for part in module.modules()]
    try:
        module.eval()
        yield
    finally:
        for part, training in modes:
            part.training = training
