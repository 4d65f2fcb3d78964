"""What a user calls."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

from torch import nn
from torch_geometric.data import Data

from gact_graph.adaptive.state_checks import check_count, check_keys
from gact_graph.api.advice import Advice
from gact_graph.api.budget.budget import Budget
from gact_graph.api.budget.estimate import Estimate
from gact_graph.api.budget.miniature import CannotShrink
from gact_graph.api.budget.trials import estimate_call
from gact_graph.api.controller import Controller
from gact_graph.api.forward import should_compress
from gact_graph.api.install import check_module, install, patch_of, remove, wrapped
from gact_graph.api.report import Report
from gact_graph.api.report.names import parse_bytes
from gact_graph.api.tracked import NEWER
from gact_graph.capture.config import MIN_BYTES, Config
from gact_graph.layers.halo.exchange import Exchange
from gact_graph.layers.halo.layers import attach
from gact_graph.layers.halo.supported import check_supported
from gact_graph.ops.quantize import check_bits
from gact_graph.support.peak import peak_so_far
from gact_graph.support.warn import warn

_FEW_BITS = 2
"""Below this, many elements have one bit. Unbiased, it is the least or the largest of a group: for
256 elements of a normal distribution that noise has about seven times their own variance."""

Model = TypeVar("Model", bound=nn.Module)


def wrap(
    model: Model,
    bits: float | None = None,
    *,
    memory: float | str | None = None,
    level: str | None = None,
    adaptive: bool = True,
    adapt_interval: int = 500,
    pin: Mapping[str, int] | None = None,
    group_size: int = 256,
    blocks: int | str | None = None,
    min_bytes: int = MIN_BYTES,
    methods: Sequence[str] = (),
    partition: Data | None = None,
    halo_bits: int = 32,
    seed: int = 0,
) -> Model:
    """Makes ``model`` keep what it saves for backward in a few bits an element.

    Activation compressed training as in GACT (ICML 2022, https://arxiv.org/abs/2206.11357). The
    training loop stays as it is. In evaluation mode and under ``no_grad`` nothing changes.

    Args:
        model: Any module with parameters. It is changed in place: same object, class and
            ``state_dict``.
        bits: Bits an element of a quantized context: 1 to 16, or 32 for none quantized. Default: 4.
            With ``adaptive`` it is the average over those whose width is free, and may be a
            fraction; what ``pin`` names, and what an operation needs more bits of, comes on top.
            Below 2 a warning says that the noise may keep the model from learning.
        memory: In place of ``bits``, ``level`` and ``blocks``: how much training may add to what is
            there before its first step, in bytes or as in ``"8 GB"``, on the model's device: of
            CUDA's allocator, or of the resident set of the process. Gradients, two tensors for
            each parameter (which Adam keeps) and libraries that load at the first step count;
            parameters and inputs do not. The first training call chooses the least lossy strategy
            that fits: the model uncompressed, ``"lossless"``, ``"lossless"`` in blocks, then
            ``"L1"`` or ``"CB2"`` with 8 to 2 bits. A larger graph may later need another choice.
            ``min_bytes`` is then 0, and on a CPU freed tensors return to the system immediately.
        level: ``"L0"`` keeps every context as PyTorch does and only takes account of them.
            ``"lossless"`` keeps masks, indices, gathered tensors and what is never read in exact
            small forms: gradients are bit-identical. ``"L1"``, the default, also quantizes what is
            left.
            ``"L2"`` is ``"L1"`` with masks and quantized contexts of 1 MiB or more swapped from a
            CUDA device to pinned host memory; elsewhere it equals ``"L1"``, and ``report`` says
            so. With ``"CB2"`` a message passing layer saves its inputs alone, as in L1, and is
            computed again in backward; what its blocks read then waits at 8 bits or more. ``"CB1"``
            is an alias of ``"CB2"``.
        adaptive: Spend the bits where the gradient needs them, by sensitivities that are measured
            in backward while the model trains (paper, section 4.1): all of them together in the
            first compressed step, which takes about twice as long; again in the 32nd and at each
            interval. Forward never runs again. Without it all contexts have the same bits.
        adapt_interval: Forwards from one measurement to the next.
        pin: Bits for the slots whose names match a pattern, as in ``{"*.lin*": 8}``.
        group_size: Elements that share a minimum and a step: a multiple of 64, at most 2^20.
        blocks: Edges that a message passing layer works on at a time, 1 to 2^40, or ``"auto"``,
            which also leaves a layer alone whose messages take less than a quarter of
            ``min_bytes``. The edge work then runs for one block of destination nodes after another,
            in forward, in backward (where each block is computed again) and in evaluation: no
            tensor of messages is alive for more than a block. Sums come in another order.
            ``report`` tells which layers cannot. False: layers run as PyG has them. None: False at
            ``"L0"`` and ``"lossless"``, ``"auto"`` at the other levels.
        min_bytes: A call is left alone where compression lowers the peak by fewer bytes than this:
            coding takes time. Counted is what autograd saves, without tensors that are kept by
            reference and without the largest one, which is whole while it is made and read. The
            call before decides; in the first one, contexts are kept as they are until they take
            this much. 0 codes all.
        methods: Names of methods that are tracked as ``forward`` is, for a training loop that
            calls them in its place, as in ``("encode",)``. Without any, PyG's autoencoders are
            tracked in ``encode`` too, and a ``LightningModule`` in the forward of each part.
        partition: This process's part of a graph, as ``gact_graph.distributed.partition`` gives
            it: layers then fetch the rows of nodes that other processes have, in forward, and in
            backward give their gradients back. All processes call the model at the same time, in
            training and in evaluation. With ``adaptive`` each measures on its part, without the
            others, and the mean of what they measured decides.
        halo_bits: Bits of an element on its way to another process; 32: as it is.
        seed: Seed of the quantization noise, which never touches torch's generators.

    Returns:
        The same ``model``.

    Raises:
        TypeError: An argument is of the wrong type.
        ValueError: An argument is out of range, or ``memory`` comes with ``bits``, ``level`` or
            ``blocks``; or the model has no parameters, is wrapped, holds a wrapped module or is
            part of a wrapped model, or is scripted or traced by torch.jit; or with ``partition`` it
            has a layer that reads more than a node's own edges, or is to be computed again in
            backward. A layer that PyG does not have raises it in its first forward.
    """
    check_module(model)
    chosen = {"bits": bits, "level": level, "blocks": blocks}
    given = [f"{name}={value!r}" for name, value in chosen.items() if value is not None]
    if memory is not None and given:
        raise ValueError(
            "Expected memory in place of bits, level and blocks, which it chooses (got "
            f"{', '.join(given)} too); leave them out, or leave memory out"
        )
    if pin is not None and not isinstance(pin, Mapping):
        raise TypeError(
            f"Expected pin to map patterns of slot names to bits (got {type(pin).__name__}); "
            "write {'*.lin*': 8}"
        )
    config = Config(
        bits=Config.bits if bits is None else bits,
        level=Config.level if level is None else level,
        adaptive=adaptive,
        adapt_interval=adapt_interval,
        pin=dict(pin or {}),
        group_size=group_size,
        blocks=blocks,
        min_bytes=min_bytes,
        seed=seed,
    )
    exchange = None
    if partition is not None:
        exchange = _exchange(model, partition, halo_bits, config, memory is not None)
    patch = install(model, config, methods)
    patch.adviser = Advice
    if exchange is not None:
        patch.controller.share(exchange)
        patch.halo = [*attach(model, exchange)]
    if memory is not None:
        patch.budget = Budget(parse_bytes(memory), config)
        patch.controller.configure(None, model)
    if config.quantize and config.bits < _FEW_BITS:
        warn(
            f"With bits={config.bits:g} many elements have one bit, which rounds them to the least "
            "or the largest of their group: that noise may keep the model from learning. Take "
            "bits=2 or more."
        )
    return model


def _exchange(
    model: nn.Module, part: Data, bits: int, config: Config, has_budget: bool
) -> Exchange:
    """What fetches the rows of a part, if the model can run on one; see ``wrap``."""
    if not isinstance(part, Data) or "halo_counts" not in part:
        raise TypeError(
            "Expected partition to be one of the parts that gact_graph.distributed.partition gives "
            f"(got {type(part).__name__})"
        )
    if has_budget:
        raise ValueError(
            "Expected bits rather than memory with partition (got memory), for a budget tries "
            "steps, which would wait for the other processes"
        )
    if config.recompute:
        raise ValueError(
            "Expected level 'L0', 'lossless', 'L1' or 'L2' with partition (got "
            f"{config.level!r}), for a layer that is computed again would fetch its rows again"
        )
    check_bits(bits)
    check_supported(model)
    return Exchange(part, bits, config.seed)


def unwrap(model: Model) -> Model:
    """Undoes ``wrap`` and returns the same ``model``; graphs made before still work.

    Raises:
        TypeError: ``model`` is no module.
        ValueError: ``model`` is not wrapped.
    """
    remove(wrapped(model))
    return model


def report(model: nn.Module, *, by: str = "slot") -> Report:
    """Where the memory of the last compressed forward went: print it, or ``save`` it as a page.

    Args:
        model: A wrapped model.
        by: What has a row in the table: ``"slot"`` or ``"layer"``.

    Raises:
        TypeError: ``model`` is no module.
        ValueError: ``model`` is not wrapped, or ``by`` is something else.
    """
    patch = wrapped(model)
    found = patch.controller.report
    if not found.empty:
        found = dataclasses.replace(found, peak_bytes=peak_so_far(next(model.parameters()).device))
    exchange = patch.controller.exchange
    if exchange is not None:
        found = dataclasses.replace(found, halo_bytes=exchange.sent_bytes)
    if patch.budget is not None and patch.budget.strategy is not None:
        found = dataclasses.replace(found, strategy=patch.budget.strategy.name)
    return found if found.by == by else dataclasses.replace(found, by=by)


def estimate(
    model: nn.Module,
    *inputs: Any,
    memory: float | str | None = None,
    nodes: int | None = None,
    edges: int | None = None,
) -> Estimate:
    """Estimate the memory of a training step under each strategy.

    A copy of the model trains on parts of the graph, and the memory is extrapolated to the whole.
    The model, its gradients, buffers and random states do not change; on CUDA, the allocator's peak
    is reset. Print the result, or take ``to_dict()``; :class:`gact_graph.Estimate` defines a peak.

    Args:
        model: Any module with parameters, wrapped or not, on the device that it is to train on.
        inputs: The positional arguments of its forward: among them an ``edge_index`` [2, E] or a
            sparse matrix, for each type of edges if there are several.
        memory: A budget in bytes, or as in ``"8 GB"``: the table then says what fits.
        nodes: Of the graph that is meant, all types together, if it is not the one in ``inputs``;
            tensors whose length is the number of nodes grow with it.
        edges: Likewise.

    Raises:
        TypeError: ``model`` is no module, or ``memory`` is neither a number nor a text.
        ValueError: No graph is found in ``inputs``, ``memory`` is malformed, or the model has no
            parameters.
    """
    check_module(model)
    budget = None if memory is None else parse_bytes(memory)
    for name, count in (("nodes", nodes), ("edges", edges)):
        if count is not None:
            check_count(name, count)
    patch = patch_of(model)
    config = Config() if patch is None else patch.controller.config
    try:
        return estimate_call(model, "forward", (inputs, {}), config, budget, nodes, edges)
    except CannotShrink as reason:
        raise ValueError(
            f"Expected inputs that contain a graph (got {reason}); pass the inputs of the model"
        ) from reason


def state_dict(model: nn.Module) -> dict[str, Any]:
    """What the library itself must remember to go on: bits by slot, sensitivities, counters.

    Plain numbers, to be saved beside the model's and the optimizer's.

    Raises:
        TypeError: ``model`` is no module.
        ValueError: ``model`` is not wrapped.
    """
    patch = wrapped(model)
    controller = patch.controller
    states = {method: tracked.state_dict() for method, tracked in controller.methods.items()}
    own = states.pop("forward")
    state = {"forwards": controller.forwards, **own, "methods": states}
    return state if patch.budget is None else state | {"strategy": patch.budget.state_dict()}


def load_state_dict(model: nn.Module, state: Mapping[str, Any]) -> None:
    """Takes over what ``state_dict`` gave, of a model that was wrapped alike.

    The state is checked as a whole first: after an error the model is as it was.

    Raises:
        TypeError: ``model`` is no module, or an entry of ``state`` is of the wrong type.
        ValueError: ``model`` is not wrapped; or ``state`` lacks a key, has one too many or a value
            out of range, or comes from an adaptive model and this one is not, or the other way
            round. The message names the entry.
    """
    patch = wrapped(model)
    controller = patch.controller
    # Earlier versions did not have the optional ones.
    optional = ["saved_bytes", "methods", *NEWER, *(() if patch.budget is None else ("strategy",))]
    check_keys("state", state, ("forwards", "scheme", "adaptation"), optional)
    state = {"saved_bytes": None, "methods": {}, **state}
    if patch.budget is None:
        _load(controller, state)
        return
    strategy = patch.budget.state_dict()
    before = {method: tracked.state_dict() for method, tracked in controller.methods.items()}
    patch.budget.load_state_dict(state.get("strategy"), patch)
    try:
        _load(controller, state)
    except (TypeError, ValueError):
        patch.budget.load_state_dict(strategy, patch)
        for method, one in before.items():
            controller.methods[method].load_state_dict(one)
        raise


def _load(controller: Controller, state: Mapping[str, Any]) -> None:
    check_count("state['forwards']", state["forwards"])
    others = {method for method in controller.methods if method != "forward"}
    check_keys("state['methods']", state["methods"], others)
    states = {
        method: (f"state['methods'][{method!r}]", state["methods"][method]) for method in others
    }
    keys = ("scheme", "adaptation", "saved_bytes", *NEWER)
    own = {key: state[key] for key in keys if key in state}
    states["forward"] = "state", own
    for method, (path, one) in states.items():
        controller.methods[method].check_state(path, one)
    # Nothing below can fail.
    controller.forwards = state["forwards"]
    for method, (_, one) in states.items():
        controller.methods[method].load_state_dict(one)


@contextmanager
def compress(model: nn.Module) -> Iterator[None]:
    """Compresses what autograd saves inside the block, for a loop that calls parts of a model.

    ```python
    with gact_graph.compress(model):
        z = model.encode(x, edge_index)
        out = model.decode(z, pairs)
    ```

    The inputs are not known here, so tensors without history that are handed to a submodule count
    as inputs and are kept by reference. In evaluation mode and under ``no_grad`` nothing happens.

    Raises:
        TypeError: ``model`` is no module.
        ValueError: ``model`` is not wrapped, or has a memory budget.
    """
    patch = wrapped(model)
    controller = patch.controller
    if patch.budget is not None:
        raise ValueError(
            "Expected bits, level and blocks rather than memory inside compress (got a memory "
            "budget, which needs the arguments of a whole call to choose by); name the methods "
            "that the loop calls, as in gact_graph.wrap(model, memory=..., methods=('encode',))"
        )
    if not should_compress(model) or controller.session is not None:
        yield
        return
    with controller.capturing(model):
        yield
