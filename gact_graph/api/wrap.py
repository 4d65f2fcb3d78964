"""The functions of ``gact_graph`` that a user calls."""

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
from gact_graph.api.budget.plan import Plan
from gact_graph.api.budget.planning import Preference, check_preference, plan_call
from gact_graph.api.budget.trials import estimate_call
from gact_graph.api.controller import Controller
from gact_graph.api.forward import should_compress
from gact_graph.api.install import (
    check_module,
    check_parameters,
    install,
    patch_of,
    remove,
    wrapped,
)
from gact_graph.api.report import Report, format_bytes
from gact_graph.api.report.names import parse_bytes
from gact_graph.api.tracked import NEWER, TrackedMethod
from gact_graph.capture.config import MIN_BYTES, BlockSize, Config, LevelName
from gact_graph.layers.halo.exchange import Exchange
from gact_graph.layers.halo.layers import attach
from gact_graph.layers.halo.supported import check_supported
from gact_graph.ops.quantize import check_bits
from gact_graph.support.messages import warn
from gact_graph.support.peak import peak_so_far, total_bytes

_FEW_BITS = 2
"""With fewer bits, many elements have one bit, which rounds them, unbiased, to the least or the
largest of a group. For 256 normally distributed elements, the noise has seven times their variance.
"""

_NO_GRAPH = "Expected inputs that contain a graph (got {}); pass the inputs of the model"

Model = TypeVar("Model", bound=nn.Module)


def wrap(
    model: Model,
    bits: float | None = None,
    *,
    memory: float | str | None = None,
    prefer: Preference = "time",
    plan: Plan | None = None,
    level: LevelName | None = None,
    blocks: BlockSize | None = None,
    min_bytes: int = MIN_BYTES,
    methods: Sequence[str] = (),
    adaptive: bool = True,
    adapt_interval: int = 500,
    pin: Mapping[str, int] | None = None,
    group_size: int = 256,
    seed: int = 0,
    partition: Data | None = None,
    halo_bits: int = 32,
) -> Model:
    """Compress the tensors that ``model`` saves for backward.

    Activation compressed training as in GACT (ICML 2022,
    https://arxiv.org/abs/2206.11357), to train with less memory. The training
    loop does not change. In evaluation mode and under ``no_grad``, nothing is
    compressed.

    Args:
        model: A module with parameters. It is patched in place: object, class
            and ``state_dict`` remain the same.
        bits: Bits per element of quantized tensors: 1 to 16, or 32 for no
            quantization. Default: 4. With ``adaptive``, the average over all
            slots without fixed bits, which may be a fraction. Below 2, a
            warning says that the noise may prevent learning.
        memory: A budget in bytes, or as in ``"8 GB"``, in place of ``bits``,
            ``level`` and ``blocks``: the memory that training may add on the
            model's device (CUDA's allocator, or the resident set of the
            process). It includes gradients, two more tensors per parameter as
            for Adam, and libraries that load in the first step, but not
            parameters and inputs. The first training call makes a plan, see
            :func:`plan`, and a larger graph may need another one. ``min_bytes``
            is then 0, and on a CPU the heap of the C library keeps less freed
            memory.
        prefer: With ``memory``: ``"time"`` runs message passing in blocks
            wherever compression is worth it, ``"accuracy"`` only where the
            model would not fit without; see :func:`plan`.
        plan: A plan that :func:`plan` made for this model and a graph that is
            at least as large, in place of ``memory``.
        level: ``"L0"`` compresses nothing and reports the memory.
            ``"lossless"`` stores masks, indices and gathered tensors in small
            exact forms, and drops tensors that backward never reads; gradients
            are bit-identical. ``"L1"`` (default) also quantizes all other
            tensors. ``"L2"`` is ``"L1"`` with tensors of 1 MiB or more swapped
            from a CUDA device to host memory, or from a CPU to temporary files;
            with ``bits=32`` they are exact. ``"CB2"`` is ``"L1"`` with
            message passing layers that save their inputs only and run again in
            backward, where tensors for blocks take 8 bits or more.
        blocks: Edges per block of a message passing layer, 1 to 2^40. Layers
            then run for one block of destination nodes after another, in
            forward (also in evaluation) and again in backward, so that no
            tensor of all messages exists; sums may differ in rounding.
            ``"auto"`` or True chooses the size, and excludes layers with
            messages below a quarter of ``min_bytes``. False runs layers as in
            PyG. Default: ``"auto"`` for levels that quantize, else False.
        min_bytes: Calls run uncompressed if compression would lower the peak by
            fewer bytes: by the saved tensors of the previous call, without the
            largest and those kept by reference. In the first call, tensors up
            to this size stay uncompressed. 0 compresses all calls.
        methods: Names of methods to track in addition to ``forward``, for
            training loops that call these, as in ``("encode",)``. By default
            ``encode`` of PyG's autoencoders, and the parts of a
            ``LightningModule``.
        adaptive: Assign bits by the sensitivity of the gradient (section 4.1 of
            the paper). It is measured in backward of the first compressed step,
            which takes about twice as long, of the 32nd, and of each interval;
            with ``partition``, on each part, and averaged. False assigns the
            same bits to all slots.
        adapt_interval: Number of forwards between two measurements.
        pin: Bits for slots whose names match a pattern, as in
            ``{"*.lin*": 8}``. :func:`report` lists the slots.
        group_size: Elements that share an offset and a step: a multiple of 64,
            at most 2^20.
        seed: Seed of the quantization noise, which is independent of torch's
            generators.
        partition: The part of a graph of this process, from
            ``gact_graph.distributed.partition``. Layers exchange rows of nodes
            and their gradients with the other processes, which all call the
            model at the same time, in training and in evaluation.
        halo_bits: With ``partition``: bits per element of exchanged rows; 32
            for exact rows.

    Returns:
        The same ``model``.

    Raises:
        TypeError: If an argument has the wrong type.
        ValueError: If an argument is out of range; if ``memory`` or ``plan`` is
            passed with an argument that it replaces; if the model has no
            parameters, is scripted or traced, or is, contains or belongs to a
            wrapped model; or if it cannot run on a ``partition``, or
            ``partition`` is combined with ``memory``, ``plan`` or ``"CB2"``.
            A layer of an unknown class raises this error in its first
            forward.
        MemoryBudgetError: In the first training call, if no plan fits
            ``memory``.
    """
    check_module(model)
    chosen = {"bits": bits, "level": level, "blocks": blocks}
    passed = [f"{name}={value!r}" for name, value in chosen.items() if value is not None]
    if plan is not None:
        if not isinstance(plan, Plan):
            raise TypeError(
                f"Expected plan to be a gact_graph.Plan (got {type(plan).__name__}); "
                "gact_graph.Plan.load(path) reads a file"
            )
        passed += [] if memory is None else [f"memory={memory!r}"]
        plan.check(model)
    limit = "memory" if plan is None else "plan"
    if passed and (memory is not None or plan is not None):
        raise ValueError(
            f"Expected {limit} in place of {', '.join(passed)} (got both); leave one of them out"
        )
    check_preference(prefer)
    check_bits(halo_bits, "halo_bits")
    budget = None if plan is None else plan.memory
    if memory is not None:
        budget = _budget_of(model, memory)
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
    if config.quantize and config.bits < _FEW_BITS:  # before the model changes: it may be an error
        warn(
            f"With bits={config.bits:g} many elements have one bit, which rounds them to the least "
            "or the largest of their group: that noise may keep the model from learning. Take "
            "bits=2 or more."
        )
    exchange = None
    if partition is not None:
        exchange = _exchange(model, partition, halo_bits, config, budget is not None)
    patch = install(model, config, methods)
    patch.adviser = Advice
    if exchange is not None:
        patch.controller.share(exchange)
        patch.halo = [*attach(model, exchange)]
    if budget is not None:
        patch.budget = Budget(budget, config, prefer, plan)
        patch.controller.configure(config, model, idle=True)
    return model


def _exchange(
    model: nn.Module, part: Data, bits: int, config: Config, has_budget: bool
) -> Exchange:
    """Return the exchange of rows with other processes; see :func:`wrap`."""
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
    check_supported(model)
    return Exchange(part, bits, config.seed)


def unwrap(model: Model) -> Model:
    """Remove the patches of :func:`wrap` from ``model``, and return the same ``model``.

    Backward still works for earlier forwards.

    Raises:
        TypeError: If ``model`` is not a module.
        ValueError: If ``model`` is not wrapped.
    """
    remove(wrapped(model))
    return model


def report(model: nn.Module, *, by: str = "slot") -> Report:
    """Return a report on the memory of the last training forward; print it, or ``save`` a page.

    Args:
        model: A wrapped model.
        by: The rows of the table: ``"slot"`` or ``"layer"``.

    Raises:
        TypeError: If ``model`` is not a module.
        ValueError: If ``model`` is not wrapped, or ``by`` has another value.
    """
    patch = wrapped(model)
    latest, exchange = patch.controller.report, patch.controller.exchange
    changes: dict[str, Any] = {} if latest.by == by else {"by": by}
    if not latest.empty:
        changes["peak_bytes"] = peak_so_far(next(model.parameters()).device)
    if exchange is not None:
        changes["halo_bytes"] = exchange.sent_bytes
    if patch.budget is not None and patch.budget.strategy is not None:
        changes["strategy"] = patch.budget.strategy.name
        changes["planned_bytes"] = patch.budget.planned_bytes
        changes["measured_bytes"] = patch.budget.measured_bytes
        changes["planned_seconds"] = patch.budget.planned_seconds
        changes["measured_seconds"] = patch.budget.measured_seconds
    return dataclasses.replace(latest, **changes) if changes else latest


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
        model: A module with parameters, wrapped or not, on the device for training.
        inputs: The positional arguments of its forward, including an ``edge_index`` [2, E] or a
            sparse matrix for each type of edges.
        memory: A budget in bytes, or as in ``"8 GB"``: the table then marks the strategies that
            fit.
        nodes: The number of nodes of all types, for a graph of another size than in ``inputs``;
            tensors with a row for each node grow in proportion.
        edges: The number of edges of all types, likewise.

    Raises:
        TypeError: If ``model`` is not a module, ``memory`` is neither a number nor a string, or
            ``nodes`` or ``edges`` is not an int.
        ValueError: If no graph is found in ``inputs``, ``memory`` is malformed, ``nodes`` or
            ``edges`` is negative, or the model has no parameters, has sharded ones, has
            ``SyncBatchNorm`` on several processes, or cannot be copied.
        RuntimeError: On a CPU, if the system does not report the memory of a process, as only Linux
            does.
    """
    check_module(model)
    check_parameters(model)
    budget = None if memory is None else parse_bytes(memory)
    _check_size(nodes, edges)
    try:
        return estimate_call(
            model, "forward", (inputs, {}), _settings_of(model), budget, nodes, edges
        )
    except CannotShrink as reason:
        raise ValueError(_NO_GRAPH.format(reason)) from reason


def plan(
    model: nn.Module,
    *inputs: Any,
    memory: float | str,
    prefer: Preference = "time",
    nodes: int | None = None,
    edges: int | None = None,
) -> Plan:
    """Plan a training step within a memory budget: which saved tensors stay exact, which get codes.

    A copy of the model trains on parts of the graph, which gives the memory of each part of a step,
    the sensitivity of the gradient to each tensor, and the time of codes and of offloading. An
    integer program then chooses the forms that cost least in time and error of the gradient, and
    that fit at every moment. The model, its gradients, buffers and random states do not change.

    ```python
    plan = gact_graph.plan(model, x, edge_index, memory="8 GB")
    print(plan)
    model = gact_graph.wrap(model, plan=plan)
    ```

    Args:
        model: A module with parameters, wrapped or not, on the device for training.
        inputs: The positional arguments of its forward, including an ``edge_index`` [2, E] or a
            sparse matrix for each type of edges.
        memory: The budget in bytes, or as in ``"8 GB"``; see :func:`wrap`.
        prefer: ``"time"`` plans blocks wherever the saved tensors take 16 MiB or more, since they
            are faster. ``"accuracy"`` plans stock PyG if it fits, then bit-identical gradients,
            then gradients that differ in rounding.
        nodes: The number of nodes of all types, for a graph of another size than in ``inputs``.
        edges: The number of edges of all types, likewise.

    Returns:
        The plan: print it, ``save`` it, or pass it to :func:`wrap`.

    Raises:
        TypeError: If ``model`` is not a module, ``memory`` is neither a number nor a string, or
            ``nodes`` or ``edges`` is not an int.
        ValueError: If no graph is found in ``inputs``, ``memory`` or ``prefer`` is malformed,
            ``nodes`` or ``edges`` is negative, or the model has no parameters, has sharded ones,
            has ``SyncBatchNorm`` on several processes, or cannot be copied.
        MemoryBudgetError: If no plan fits: the message names the least memory that does. Or if a
            limit of the process is below the budget.
        RuntimeError: On a CPU, if the system does not report the memory of a process, as only Linux
            does.
    """
    check_module(model)
    check_parameters(model)
    budget = _budget_of(model, memory)
    check_preference(prefer)
    _check_size(nodes, edges)
    config = _settings_of(model)
    try:
        return plan_call(model, "forward", (inputs, {}), config, budget, prefer, nodes, edges)
    except CannotShrink as reason:
        raise ValueError(_NO_GRAPH.format(reason)) from reason


def _settings_of(model: nn.Module) -> Config:
    """Return the settings that all strategies for a model share."""
    patch = patch_of(model)
    return Config() if patch is None else patch.first.settings


def _budget_of(model: nn.Module, memory: float | str) -> int:
    """Return a budget in bytes; warn if the device has less memory."""
    budget, parameter = parse_bytes(memory), next(model.parameters(), None)
    total = None if parameter is None else total_bytes(parameter.device)
    if parameter is not None and total is not None and budget > total:
        warn(
            f"The memory budget, {format_bytes(budget)}, is more than there is: "
            f"{parameter.device} has {format_bytes(total)}. Pass at most that much."
        )
    return budget


def _check_size(nodes: int | None, edges: int | None) -> None:
    for name, count in (("nodes", nodes), ("edges", edges)):
        if count is not None:
            check_count(name, count)


def state_dict(model: nn.Module) -> dict[str, Any]:
    """Return the state of the library for a model: bits by slot, sensitivities, and counters.

    To resume training, save this dict of plain numbers with the state of model and optimizer.

    Raises:
        TypeError: If ``model`` is not a module.
        ValueError: If ``model`` is not wrapped.
    """
    patch = wrapped(model)
    controller = patch.controller
    states = {method: tracked.state_dict() for method, tracked in controller.methods.items()}
    own = states.pop("forward")
    state = {"forwards": controller.forwards, **own, "methods": states}
    return state if patch.budget is None else state | {"strategy": patch.budget.state_dict()}


def load_state_dict(model: nn.Module, state: Mapping[str, Any]) -> None:
    """Load the result of :func:`state_dict` for a model that was wrapped with the same arguments.

    The whole state is checked first: an error changes nothing.

    Raises:
        TypeError: If ``model`` is not a module, or an entry of ``state`` has the wrong type.
        ValueError: If ``model`` is not wrapped; if ``state`` has missing or unknown keys, or values
            out of range; or if only one of ``state`` and ``model`` is adaptive. The message names
            the entry.
    """
    patch = wrapped(model)
    controller = patch.controller
    # Earlier versions did not save the optional keys.
    optional = ["saved_bytes", "methods", *NEWER, *(() if patch.budget is None else ("strategy",))]
    check_keys("state", state, ("forwards", "scheme", "adaptation"), optional)
    state = {"saved_bytes": None, "methods": {}, **state}
    config, strategy = controller.config, None
    if patch.budget is not None and "strategy" in state:
        strategy = patch.budget.strategy_of(state["strategy"])
        config = patch.budget.settings_of(strategy)
    states = _checked(controller, config, state)
    # Nothing below can fail.
    if patch.budget is not None and "strategy" in state:
        patch.budget.restore(strategy, patch)
    controller.forwards = state["forwards"]
    for method, own in states.items():
        controller.methods[method].load_state_dict(own)


def _checked(
    controller: Controller, config: Config, state: Mapping[str, Any]
) -> dict[str, Mapping[str, Any]]:
    """Return the state of each method, which all fit these settings; raise otherwise."""
    check_count("state['forwards']", state["forwards"])
    others = {method for method in controller.methods if method != "forward"}
    check_keys("state['methods']", state["methods"], others)
    states = {
        method: (f"state['methods'][{method!r}]", state["methods"][method]) for method in others
    }
    keys = ("scheme", "adaptation", "saved_bytes", *NEWER)
    own = {key: state[key] for key in keys if key in state}
    states["forward"] = "state", own
    for path, entry in states.values():
        TrackedMethod.under(config).check_state(path, entry)
    return {method: entry for method, (_, entry) in states.items()}


@contextmanager
def compress(model: nn.Module) -> Iterator[None]:
    """Compress the tensors that autograd saves inside the context, by any part of a model.

    ```python
    with gact_graph.compress(model):
        z = model.encode(x, edge_index)
        out = model.decode(z, pairs)
    ```

    For training loops that call parts of a model. Tensors without a graph that are passed to a
    submodule count as inputs, which are kept by reference. Nothing changes in evaluation mode and
    under ``no_grad``.

    Raises:
        TypeError: If ``model`` is not a module.
        ValueError: If ``model`` is not wrapped, or has a memory budget.
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
