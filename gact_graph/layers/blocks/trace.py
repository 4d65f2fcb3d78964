"""The graph of the operations of an edge function, traced once for each state of a layer.

The trace runs the layer's methods on fake tensors whose numbers of edges, of destinations and of
sources are symbols. So the graph holds for every block, and shows each use of these numbers.
"""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.fx.experimental.proxy_tensor import get_proxy_mode, make_fx
from torch.fx.experimental.symbolic_shapes import (
    DimDynamic,
    ShapeEnv,
    StatelessSymbolicContext,
)
from torch.overrides import TorchFunctionMode
from torch_geometric import typing

from gact_graph.layers.blocks.arguments import Arguments, CannotBlock, EdgeFunction, constant_name
from gact_graph.support.current import capture_disabled, packs_with
from gact_graph.support.graph import nodes_of
from gact_graph.support.objects import slots_of
from gact_graph.support.progress import progress
from gact_graph.support.reach import Reach
from gact_graph.support.run_state import RandomStates, random_states, set_random_states
from gact_graph.support.torch_private import (
    ConstantSource,
    DispatchMode,
    FakeTensor,
    FakeTensorMode,
    graph_task_id,
    outside_of_compilers,
    set_grad_enabled,
    without_modes,
)

EDGES, DESTINATIONS, SOURCES = 37, 23, 29
"""The sizes of the traced tensors: three unlikely widths of a layer."""

_OUTSIDE_TORCH = frozenset(
    {
        *("numpy", "__array__", "tolist", "__dlpack__", "__cuda_array_interface__", "data_ptr"),
        *("storage", "_typed_storage", "untyped_storage", "__deepcopy__", "__reduce_ex__"),
        *("item", "__bool__", "__int__", "__float__", "__index__", "__complex__", "__contains__"),
    }
)
"""Functions through which Python reads the values of a tensor."""

_HOOKS = frozenset({"register_hook", "register_post_accumulate_grad_hook", "retain_grad"})

_one_at_a_time = threading.RLock()
"""torch.fx patches classes while it traces, for all threads."""


@dataclass(frozen=True)
class Trace:
    """The graph of an edge function in one state of its layer.

    Attributes:
        graph: The graph. Its placeholders are the ``inputs``, then the ``constants``; its output is
            the result, then a tensor for each name of ``kept``.
        inputs: The names of the inputs of a block.
        constants: For each constant its number in ``Reach.tensors``.
        kept: The attributes in which the layer leaves a tensor.
        saved: The tensors that stock autograd saves, as fake tensors.
        hooked: Whether the function sets hooks of its own, as a checkpoint does: ``saved`` then
            lacks some tensors.
        differentiable: Whether each output requires a gradient.
        guarded: Whether the graph holds only under conditions on the symbols of sizes.
    """

    graph: fx.Graph
    inputs: tuple[str, ...]
    constants: tuple[int, ...]
    kept: tuple[str, ...]
    saved: tuple[Tensor, ...]
    hooked: bool
    differentiable: tuple[bool, ...]
    guarded: bool

    @cached_property
    def outputs(self) -> list[fx.Node]:
        """The result, then the tensors of :attr:`kept`."""
        (output,) = (node for node in self.graph.nodes if node.op == "output")
        return [*output.args[0]]

    @cached_property
    def placeholders(self) -> dict[str, fx.Node]:
        """The inputs and the constants by name."""
        nodes = [node for node in self.graph.nodes if node.op == "placeholder"]
        constants = (constant_name(number) for number in range(len(self.constants)))
        return dict(zip([*self.inputs, *constants], nodes, strict=True))

    def symbol(self, name: str) -> Any:
        """Return the symbol of an input that is a number."""
        return self.placeholders[name].meta["val"].node.expr


def trace(edge_function: EdgeFunction, module: Any, arguments: Arguments, reach: Reach) -> Trace:
    """Trace an edge function in the modes of the caller, which its code may read.

    Args:
        edge_function: The function that runs for each block.
        module: The layer, or the user's function.
        arguments: The arguments of one call.
        reach: Everything that the code of ``module`` reaches.

    Raises:
        CannotBlock: The function cannot be traced, or has effects that a graph would not repeat.
    """
    work = progress("tracing message passing")
    with work, _one_at_a_time, _isolated(), warnings.catch_warnings():
        # Conversion to a fake tensor reads the gradient of tensors that are no leaves.
        warnings.simplefilter("ignore")
        return _trace(edge_function, module, arguments, reach)


def _trace(edge_function: EdgeFunction, module: Any, arguments: Arguments, reach: Reach) -> Trace:
    environment = _Sizes()
    mode = FakeTensorMode(allow_non_fake_inputs=True, shape_env=environment)
    fakes = dict(_fakes(mode, arguments))
    run = _Run(edge_function, module, arguments, [*fakes])
    watch, states = reach.watch(), random_states()
    try:
        graph_module = make_fx(
            run,
            _DECOMPOSITIONS,
            tracing_mode="symbolic",
            _allow_non_fake_inputs=True,
            _error_on_data_dependent_ops=True,
        )(*fakes.values())
    except (CannotBlock, torch.OutOfMemoryError):
        raise
    except Exception as error:
        raise CannotBlock(reason_of(error)) from error
    finally:
        changed = watch.undo()
        drew = _content(states) != _content(random_states())
        if drew:
            set_random_states(states)
    if changed is not None:
        raise CannotBlock(f"changes {changed} while it makes messages")
    if drew:
        raise CannotBlock("draws random numbers outside of torch")
    graph = graph_module.graph
    constants = _lift(graph, graph_module, reach, len(fakes), mode)
    return Trace(
        graph,
        tuple(fakes),
        constants,
        tuple(run.kept),
        tuple(run.saved),
        run.hooked,
        run.differentiable,
        bool(environment.guards),
    )


class _Sizes(ShapeEnv):
    """Symbols without a line of code: the search for the line imports 400 modules of torch."""

    def _get_user_frame(self) -> None:
        return None


def _fakes(mode: FakeTensorMode, arguments: Arguments) -> Iterator[tuple[str, Any]]:
    """Yield the inputs of a block by name.

    The numbers come first: a trace reads the size of a tensor from the first input that has it, so
    no operation needs another tensor for its shape.
    """
    lengths = {"source": EDGES, "destination": EDGES, "edge": EDGES, "node": DESTINATIONS}
    device = arguments.tensors[0].device
    sizes = {"num_edges": EDGES, "dim_size": DESTINATIONS, "size_j": SOURCES}
    for name, size in sizes.items():
        yield name, _fake(mode, torch.empty(size, 0, device=device), name, True).shape[0]
    for use in arguments.uses:
        tensor = arguments.tensors[use.index]
        length = lengths.get(use.level)
        if length is not None:
            shape, gathered = (length, *tensor.shape[1:]), use.level in ("source", "destination")
            # Rows that are gathered without gradients need none.
            needed = tensor.requires_grad and (torch.is_grad_enabled() or not gathered)
            tensor = torch.empty(shape, dtype=tensor.dtype, device=device).requires_grad_(needed)
        yield use.parameter, _fake(mode, tensor, use.parameter, length is not None)
    for name in ("index", "edge_index_j"):
        yield name, _fake(mode, torch.zeros(EDGES, dtype=torch.int64, device=device), name, True)


def _fake(mode: FakeTensorMode, tensor: Tensor, name: str, rows: bool) -> Tensor:
    dynamic = [
        DimDynamic.DUCK if rows and i == 0 else DimDynamic.STATIC for i in range(tensor.dim())
    ]
    with torch.no_grad():
        leaf = tensor.detach().requires_grad_(tensor.requires_grad)
    return mode.from_tensor(
        leaf,
        source=ConstantSource(name.replace(".", "_")),
        symbolic_context=StatelessSymbolicContext(dynamic_sizes=dynamic),
    )


class _Run:
    """The traced function of the inputs, which returns the result and the kept tensors."""

    def __init__(
        self, edge_function: EdgeFunction, module: Any, arguments: Arguments, names: Sequence[str]
    ) -> None:
        self._edge_function, self._names = edge_function, names
        self._module, self._others = module, arguments.others
        self.kept: list[str] = []
        self.saved: list[Tensor] = []
        self.hooked = False
        self.differentiable: tuple[bool, ...] = ()

    def __call__(self, *values: Any) -> tuple[Tensor, ...]:
        inputs: dict[str, Any] = dict(self._others) | dict(zip(self._names, values, strict=True))
        del inputs["num_edges"]
        inputs |= {"edge_index_i": inputs["index"], "ptr": None, "size_i": inputs["dim_size"]}
        module = _shell_of(self._module) if isinstance(self._module, nn.Module) else self._module
        operations = _Operations(self._pack)
        with saved_tensors_hooks(self._pack, _same), operations, _Functions():
            out = self._edge_function.run(module, inputs)
        self.hooked = operations.hooked
        if not isinstance(out, Tensor) or out.dim() == 0:
            raise CannotBlock(NO_ROWS)
        results = [out]
        if isinstance(module, nn.Module):
            for name, value in _changes(self._module, module):
                if not isinstance(value, FakeTensor):
                    raise CannotBlock(f"changes its attribute {name} while it makes messages")
                self.kept.append(name)
                results.append(value)
        _check_functions(results)
        self.differentiable = tuple(result.requires_grad for result in results)
        if any(self.differentiable) and not torch.is_grad_enabled():
            raise CannotBlock("returns a tensor with a gradient where gradients are disabled")
        return tuple(results)

    def _pack(self, tensor: Tensor) -> Tensor:
        # Detached, because an operation that saves its own result would close a cycle.
        tensor = tensor.detach()
        self.saved.append(tensor)
        return tensor


NO_ROWS = "returns something other than a tensor with one row per node or edge"


def _same(tensor: Tensor) -> Tensor:
    return tensor


def _shell_of(module: nn.Module) -> Any:
    """Return a module with the same attributes, whose changes do not reach the user's layer."""
    shell: Any = object.__new__(type(module))
    vars(shell).update(vars(module))
    for group in ("_parameters", "_buffers", "_modules"):
        vars(shell)[group] = dict(vars(module)[group])
    kind: Any = type(module)
    for name in slots_of(kind):
        if hasattr(module, name):
            object.__setattr__(shell, name, getattr(module, name))
    return shell


def _changes(module: nn.Module, shell: nn.Module) -> Iterator[tuple[str, Any]]:
    """Yield the attributes of the shell that differ from those of the module."""
    for group in (None, "_parameters", "_buffers", "_modules"):
        before = vars(module) if group is None else vars(module)[group]
        now = vars(shell) if group is None else vars(shell)[group]
        for name in [*now, *(before.keys() - now.keys())]:
            if group is None and name in ("_parameters", "_buffers", "_modules"):
                continue
            if now.get(name, _same) is not before.get(name, _same):
                yield name, now.get(name)


class _Operations(DispatchMode):
    """Refuses operations whose result depends on values in a way that no graph represents.

    Attributes:
        hooked: Whether an operation ran under other hooks on saved tensors.
    """

    def __init__(self, pack: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.hooked = False
        self._pack = pack
        self._inference = torch.is_inference_mode_enabled()
        self._backward = graph_task_id()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if torch.is_inference_mode_enabled() != self._inference:
            raise CannotBlock("changes the inference mode")
        if graph_task_id() != self._backward:
            raise CannotBlock("differentiates while it makes messages")
        self.hooked = self.hooked or not packs_with(self._pack)
        if torch.Tag.data_dependent_output in func.tags:
            raise CannotBlock(_READS_VALUES)
        packet = func.overloadpacket
        by_positions = packet is torch.ops.aten.index and not _has_mask(args[1])
        if torch.Tag.dynamic_output_shape in func.tags and not by_positions:
            raise CannotBlock(f"makes a tensor whose size depends on values ({packet.__name__})")
        return func(*args, **(kwargs or {}))


_READS_VALUES = "reads values of tensors in Python"


def _has_mask(indices: Iterable[Any]) -> bool:
    return any(isinstance(i, Tensor) and i.dtype in (torch.bool, torch.uint8) for i in indices)


class _Functions(TorchFunctionMode):
    """Records changes of the gradient mode, and refuses functions that a graph would lose."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(func, "__name__", "")
        if name in ("__get__", "__set__"):
            assigns = name == "__set__"
            name = getattr(getattr(func, "__self__", None), "__name__", "")
            if name == "data" and assigns:
                raise CannotBlock("assigns the data of a tensor")
            if name == "data":
                return args[0].detach()
        if name in _OUTSIDE_TORCH and any(isinstance(arg, Tensor) for arg in args):
            raise CannotBlock(_READS_VALUES)
        if name in _HOOKS:
            raise CannotBlock(f"calls {name} of a tensor")
        if func is set_grad_enabled:
            proxies = get_proxy_mode()
            if proxies is not None:
                proxies.tracer.create_node("call_function", func, args, {})
        return func(*args, **(kwargs or {}))


def _check_functions(results: Sequence[Tensor]) -> None:
    """Refuse autograd functions written in Python: a trace would lose their backward."""
    for node in nodes_of(results):
        kind = type(node)
        if kind.__module__ != "builtins" or hasattr(kind, "_forward_cls"):
            name = getattr(getattr(kind, "_forward_cls", kind), "__name__", kind.__name__)
            raise CannotBlock(f"calls the autograd function {name}, which has its own backward")


def _lift(
    graph: fx.Graph, owner: fx.GraphModule, reach: Reach, count: int, mode: FakeTensorMode
) -> tuple[int, ...]:
    """Replace the constants in the graph by placeholders, and return their numbers.

    Raises:
        CannotBlock: A constant is not among the tensors that the layer reaches.
    """
    numbers = {id(tensor): number for number, (_, tensor) in enumerate(reach.tensors)}
    placeholders = [node for node in graph.nodes if node.op == "placeholder"]
    last, lifted = placeholders[count - 1], dict[int, fx.Node]()
    for node in [*graph.nodes]:
        if node.op != "get_attr":
            continue
        tensor = getattr(owner, node.target)
        number = numbers.get(id(tensor))
        if number is None:
            literal = all(user.target in _LITERALS for user in node.users)
            if not isinstance(tensor, Tensor) or tensor.requires_grad or not literal:
                raise CannotBlock("reads a tensor that is not among its arguments")
            continue
        if number not in lifted:
            with graph.inserting_after(last):
                last = lifted[number] = graph.placeholder(f"constant_{number}")
            # The fake tensor that the trace has used.
            last.meta["val"] = mode.from_tensor(tensor, static_shapes=True)
        node.replace_all_uses_with(lifted[number])
        graph.erase_node(node)
    graph.owning_module = owner
    return tuple(lifted)


_LITERALS = frozenset({torch.ops.aten.lift_fresh_copy.default, torch.ops.aten.lift_fresh.default})


def _of_shape(make: Callable[..., Tensor], like: bool) -> Callable[..., Tensor]:
    """Return an operation that reads the shape or type of a tensor, in terms of both alone."""

    def run(tensor: Tensor, *arguments: Any, **settings: Any) -> Tensor:
        shape, *fill = (tensor.shape, *arguments) if like else arguments
        dtype, device = settings.get("dtype"), settings.get("device")
        return make(shape, *fill, dtype=dtype or tensor.dtype, device=device or tensor.device)

    return run


_aten = torch.ops.aten

_DECOMPOSITIONS = {
    _aten.new_zeros.default: _of_shape(torch.zeros, like=False),
    _aten.new_ones.default: _of_shape(torch.ones, like=False),
    _aten.new_empty.default: _of_shape(torch.empty, like=False),
    _aten.new_full.default: _of_shape(torch.full, like=False),
    _aten.zeros_like.default: _of_shape(torch.zeros, like=True),
    _aten.ones_like.default: _of_shape(torch.ones, like=True),
    _aten.full_like.default: _of_shape(torch.full, like=True),
}


def _content(states: RandomStates) -> tuple[Any, ...]:
    """Return the states of the generators of Python and NumPy, which can be compared."""
    _, words, *position = states.numpy
    return states.python, words.tobytes(), position


@contextmanager
def _isolated() -> Iterator[None]:
    """Hide the trace from sessions and other dispatch modes, and make PyG use torch alone.

    A cast of a parameter that autocast has cached would not be in the graph, and operators of
    torch_scatter have no fake implementation.
    """
    cached, scatter = torch.is_autocast_cache_enabled(), typing.WITH_TORCH_SCATTER
    torch.set_autocast_cache_enabled(False)
    typing.WITH_TORCH_SCATTER = False
    try:
        with capture_disabled(), without_modes(), outside_of_compilers():
            yield
    finally:
        torch.set_autocast_cache_enabled(cached)
        typing.WITH_TORCH_SCATTER = scatter


def reason_of(error: Exception) -> str:
    """Return the reason to run as in PyG that an error during a trace is."""
    first = str(error).strip().partition("\n")[0]
    return f"cannot be traced ({type(error).__name__}: {first})"
