"""Private names of PyTorch: one module reaches them, and each does what the library expects."""

from __future__ import annotations

import ast
import inspect
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np
import pytest
import torch
from seen import SeenFunctions
from torch import Tensor, fx, nn
from torch.autograd import forward_ad
from torch.autograd.graph import saved_tensors_hooks
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext
from torch.nn.parallel import DistributedDataParallel
from torch.overrides import TorchFunctionMode
from torch_geometric.data import HeteroData

import gact_graph
from gact_graph.support import torch_private as private

ROOT = Path(gact_graph.__file__).parent
HOME = Path(private.__file__)

CHECKS: dict[str, Callable[[], None]] = {}
"""A check of behavior for each name, and for each private attribute of an object."""


def check(*names: str) -> Callable[[Callable[[], None]], Callable[[], None]]:
    def add(function: Callable[[], None]) -> Callable[[], None]:
        CHECKS.update(dict.fromkeys(names, function))
        return function

    return add


def leaf(*shape: int) -> Tensor:
    return torch.ones(shape, requires_grad=True)


def node_of(result: Tensor) -> Any:
    return result.grad_fn


def in_backward(read: Callable[[], Any]) -> Any:
    """What ``read`` returns while a node runs backward."""
    x, seen = leaf(3), []
    result = x.exp()
    node_of(result).register_hook(lambda *_: seen.append(read()))
    result.sum().backward()
    return seen[0]


@check("graph_task_id")
def _() -> None:
    assert private.graph_task_id() == -1
    assert in_backward(private.graph_task_id) >= 0


@check("running_node")
def _() -> None:
    assert in_backward(lambda: private.running_node().name()) == "ExpBackward0"


@check("at_end_of_backward")
def _() -> None:
    order: list[str] = []
    x = leaf(3)
    x.register_post_accumulate_grad_hook(lambda _: order.append("gradient"))
    result = x.exp()
    node_of(result).register_hook(
        lambda *_: private.at_end_of_backward(lambda: order.append("end"))
    )
    result.sum().backward()
    assert order == ["gradient", "end"]


@check("next_sequence_number", "_sequence_nr")
def _() -> None:
    number = private.next_sequence_number()
    first = leaf(3).exp()
    assert node_of(first)._sequence_nr() == number
    assert node_of(first.sin())._sequence_nr() == private.next_sequence_number() - 1 == number + 1


@check("saved_tensor_hooks")
def _() -> None:
    def pack(x: Tensor) -> Tensor:
        return x

    assert private.saved_tensor_hooks(False) is None
    with saved_tensors_hooks(len, len), saved_tensors_hooks(pack, abs):
        assert private.saved_tensor_hooks(False) == (pack, abs)


@check("function_transform")
def _() -> None:
    seen = []
    torch.func.grad(lambda x: (seen.append(private.function_transform()), x.sum())[1])(leaf(3))
    assert private.function_transform() is None and seen[0] is not None


@check("is_batched")
def _() -> None:
    seen = []
    x = leaf(3)
    result = x * 2
    result.register_hook(lambda gradient: seen.append(private.is_batched(gradient)))
    torch.autograd.grad(result, x, torch.eye(3), retain_graph=True, is_grads_batched=True)
    torch.autograd.grad(result, x, torch.ones(3))
    assert seen == [True, False]


@check("has_global_hooks")
def _() -> None:
    assert not private.has_global_hooks()
    handle = torch.nn.modules.module.register_module_forward_hook(lambda *arguments: None)
    assert private.has_global_hooks()
    handle.remove()
    assert not private.has_global_hooks()


@check("in_forward_mode")
def _() -> None:
    assert not private.in_forward_mode()
    with forward_ad.dual_level():
        assert private.in_forward_mode()


@check("neg_view")
def _() -> None:
    x = torch.ones(3)
    view = private.neg_view(x)
    assert view.is_neg() and view.data_ptr() == x.data_ptr() and view.sum() == -3


@check("holders_of", "_cdata")
def _() -> None:
    x = torch.ones(3)
    alone = private.holders_of(x)
    view = x[1:]
    assert alone == 2 and private.holders_of(x) == 3
    assert view.untyped_storage()._cdata == x.untyped_storage()._cdata
    assert x.clone().untyped_storage()._cdata != x.untyped_storage()._cdata


@check("CPU_KEY")
def _() -> None:
    x = torch.ones(3)
    assert torch.ops.aten.add.Tensor.redispatch(private.CPU_KEY, x, x).sum() == 6


@check("has_kernel")
def _() -> None:
    assert private.has_kernel("aten::mm", "CPU") and not private.has_kernel("aten::mm", "FPGA")


@check("OpOverload", "_schema")
def _() -> None:
    aten = torch.ops.aten
    assert isinstance(aten.add_.Tensor, private.OpOverload)
    assert not isinstance(torch.add, private.OpOverload)
    assert aten.add_.Tensor._schema.is_mutable and not aten.add.Tensor._schema.is_mutable
    assert torch.Tag.nondeterministic_seeded in aten.native_dropout.default.tags


@check("set_grad_enabled")
def _() -> None:
    seen: list[Any] = []
    with SeenFunctions(seen), torch.no_grad():
        pass
    assert private.set_grad_enabled in seen


@check("function_mode", "pop_function_mode", "push_function_mode")
def _() -> None:
    with TorchFunctionMode() as mode:
        assert private.function_mode() is private.pop_function_mode() is mode
        assert private.function_mode() is None
        private.push_function_mode(mode)
        assert private.function_mode() is mode


@check("function_modes")
def _() -> None:
    inside: list[Any] = []

    class Watched(TorchFunctionMode):
        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None):
            inside.extend(private.function_modes())
            return func(*args, **(kwargs or {}))

    x = torch.ones(3)
    assert private.function_modes() == []
    with TorchFunctionMode() as outer, Watched() as mode:
        assert private.function_modes() == [outer, mode]
    with torch.device("cpu"), Watched():
        x.exp()
    [of_device] = inside
    assert type(of_device).__module__.startswith("torch.")


@check("without_functions")
def _() -> None:
    seen: list[Any] = []
    x = torch.ones(3)
    with SeenFunctions(seen):
        torch.exp(x)
        with private.without_functions():
            torch.sin(x)
            torch.nn.functional.leaky_relu(x)
    assert seen == [torch.exp]


@check("DispatchMode", "without_modes", "dispatch_modes")
def _() -> None:
    seen = []

    class Watched(private.DispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None):
            seen.append(func)
            return func(*args, **(kwargs or {}))

    x = torch.ones(3)
    assert private.dispatch_modes() == []
    with Watched() as mode:
        assert private.dispatch_modes() == [mode]
        x.exp()
        with private.without_modes():
            x.sin()
            assert private.dispatch_modes() == []
    assert seen == [torch.ops.aten.exp.default]


@check("FakeTensor", "FakeTensorMode", "ConstantSource")
def _() -> None:
    mode = private.FakeTensorMode(allow_non_fake_inputs=True, shape_env=ShapeEnv())
    fake = mode.from_tensor(
        torch.ones(37, 3),
        source=private.ConstantSource("rows"),
        symbolic_context=StatelessSymbolicContext(
            dynamic_sizes=[DimDynamic.DUCK, DimDynamic.STATIC]
        ),
    )
    assert isinstance(fake, private.FakeTensor) and isinstance(fake.shape[0], torch.SymInt)
    with mode:
        assert (fake + 1).shape[1] == 3


@check("DynamicOutputShapeException")
def _() -> None:
    with private.FakeTensorMode() as mode, pytest.raises(private.DynamicOutputShapeException):
        mode.from_tensor(torch.ones(3)).nonzero()


@check("TreeSpec", "tree_flatten", "tree_leaves", "tree_map", "tree_unflatten")
def _() -> None:
    nested = {"a": (1, [2]), "b": None}
    leaves, structure = private.tree_flatten(nested)
    assert leaves == private.tree_leaves(nested) == [1, 2, None]
    assert isinstance(structure, private.TreeSpec)
    assert private.tree_unflatten(leaves, structure) == nested
    assert private.tree_map(str, nested) == {"a": ("1", ["2"]), "b": "None"}


@check("AnyBatchNorm", "_check_input_dim")
def _() -> None:
    kinds = nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm
    assert all(isinstance(kind(2), private.AnyBatchNorm) for kind in kinds)
    assert not isinstance(nn.InstanceNorm1d(2), private.AnyBatchNorm)
    with pytest.raises(ValueError, match="2D or 3D"):
        nn.BatchNorm1d(2)._check_input_dim(torch.ones(1, 2, 3, 4))


@check("OptimizedModule", "FUNCTORCH", "compiled_graphs", "_node", "_fw_graph", "_bw_graph")
def _() -> None:
    seen = []

    def look(x: Tensor) -> Tensor:
        seen.append(private.compiled_graphs())
        return x

    graph = fx.Graph()
    graph.output(graph.call_function(look, (graph.placeholder("saved"),)))
    hook = fx.GraphModule(nn.Module(), graph)
    torch._dynamo.reset()  # earlier tests may have reached its limit for this forward
    compiled = torch.compile(nn.Sequential(nn.Tanh(), nn.Sigmoid()), backend="aot_eager")
    with saved_tensors_hooks(hook, hook):
        node = node_of(compiled(leaf(3, 2)))
    assert isinstance(compiled, private.OptimizedModule) and private.compiled_graphs() is None
    assert node._forward_cls.__module__.startswith(private.FUNCTORCH)
    context = next(context for context in seen if context is not None)
    assert isinstance(context["_node"], fx.Node) and "val" in context["_node"].meta
    assert all(isinstance(context[name], fx.Graph) for name in ("_fw_graph", "_bw_graph"))


@check("set_compiler", "not_compiled")
def _() -> None:
    seen: list[bool] = []

    def inner(x: Tensor) -> Tensor:
        seen.append(torch.compiler.is_compiling())
        return x + 1

    def outer(x: Tensor) -> Tensor:
        compiler = private.set_compiler(None)
        seen.append(compiler is None)
        try:
            inner(x)
            private.set_compiler(compiler)
            return inner(x)
        finally:
            private.set_compiler(compiler)

    private.not_compiled(outer.__code__)
    torch.compile(outer, backend="eager")(torch.ones(3))
    assert seen == [False, False, True]
    assert private.set_compiler(None) is None


@check(
    "nonstrict_trace", "outside_of_compilers", "TRACED_TENSORS", "FunctionalTensor", "compilation"
)
def _() -> None:
    """A function that a compiler does not look into traces another, and keeps its saved tensors."""
    torch.compiler.reset()
    kinds, saved, sizes, graphs = list[type](), list[Tensor](), list[Any](), list[Any]()

    def look(tensor: Tensor) -> Tensor:
        saved.append(tensor)
        return tensor

    @private.nonstrict_trace
    def opaque(x: Tensor) -> Tensor:
        kinds.append(type(x))
        graphs.append(private.compilation())
        with private.without_modes(), private.outside_of_compilers():
            mode = private.FakeTensorMode(shape_env=ShapeEnv())
            own = mode.from_tensor(leaf(3, 2))
            with saved_tensors_hooks(look, look):
                graph = make_fx(lambda t: t.exp(), tracing_mode="symbolic")(own).graph
            sizes.append(next(iter(graph.nodes)).meta["val"].shape == own.shape)
        return x * 2

    compiled = torch.compile(lambda x: opaque(x) + 1, backend="aot_eager", fullgraph=True)
    assert torch.equal(compiled(torch.ones(4)), torch.full((4,), 3.0))
    assert {*kinds} == {*private.TRACED_TENSORS} and saved and all(sizes)
    assert kinds[-1] is private.FunctionalTensor and private.compilation() is None
    assert graphs[0] is not None and all(graph is graphs[0] for graph in graphs)


@check("is_exporting")
def _() -> None:
    class Net(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x + 1 if private.is_exporting() else x

    torch.compiler.reset()
    x = torch.zeros(2)
    assert torch.equal(torch.compile(Net(), backend="aot_eager", fullgraph=True)(x), x)
    for strict in (True, False):
        program = torch.export.export(Net(), (x,), strict=strict)
        assert torch.equal(program.module()(x), x + 1)


@check("compiler_settings", "_tensors_no_vc_check")
def _() -> None:
    graphs = []

    def look(graph: fx.GraphModule, inputs: Any) -> fx.GraphModule:
        graphs.append(graph)
        return graph

    torch.compiler.reset()  # which else takes the graph of an earlier check
    compiled = torch.compile(nn.Sequential(nn.Tanh(), nn.Sigmoid()), backend="aot_eager")
    with private.compiler_settings().patch(joint_custom_pass=look):
        node = node_of(compiled(leaf(3, 2)))
    assert len(graphs) == 1 and isinstance(graphs[0], fx.GraphModule)
    # Of torch 2.13; torch 2.10 has all in saved_tensors.
    assert hasattr(node, "_tensors_no_vc_check") or torch.__version__ < "2.13"
    assert all(isinstance(x, Tensor) for x in getattr(node, "_tensors_no_vc_check", ()))


# Attributes of objects of PyTorch, which are read where they are needed.


@check("_input_metadata")
def _() -> None:
    assert tuple(node_of(leaf(3, 2).exp())._input_metadata[0].shape) == (3, 2)


@check("_saved_self_sym_sizes")
def _() -> None:
    for enlarged in (leaf(3, 1).expand(2, 3, 4), leaf(3, 1).repeat(2, 1, 4)):
        node = node_of(enlarged)
        assert node.name() in ("ExpandBackward0", "RepeatBackward0")
        assert tuple(node._saved_self_sym_sizes) == (3, 1)


@check("_raw_saved_tensors", "_forward_cls")
def _() -> None:
    class Double(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            ctx.save_for_backward(x, None)
            return x * 2

    with saved_tensors_hooks(lambda x: "packed", abs):
        outputs = Double.apply(leaf(3)), leaf(3).exp()  # torch 2.10 releases tensors with them
    node, native = map(node_of, outputs)
    saved = [(raw.data, raw.unpack_hook) for raw in node._raw_saved_tensors]
    assert saved == [("packed", abs), (None, None)]
    assert node._forward_cls is Double and not hasattr(native, "_forward_cls")
    assert native._raw_saved_result.data == "packed"
    assert [name for name in dir(type(native)) if name.startswith("_raw_saved_")] == [
        "_raw_saved_result"
    ]


@check("_saved_eps", "_saved_training", "_saved_p", "_saved_negative_slope")
def _() -> None:
    x = leaf(3, 2)
    norm = node_of(nn.BatchNorm1d(2, eps=0.5)(x))
    assert norm._saved_eps == 0.5 and norm._saved_training
    assert node_of(torch.native_dropout(x, 0.25, True)[0])._saved_p == 0.25
    assert node_of(nn.functional.leaky_relu(x, 0.125))._saved_negative_slope == 0.125


@check("_base", "_is_view", "_version", "_use_count")
def _() -> None:
    x = torch.ones(3)
    view = x[1:]
    version = x._version
    view.add_(1)
    assert x._version == view._version == version + 1
    assert view._base is x and x._base is None and view._is_view() and not x._is_view()
    alone = torch.ones(3)
    assert alone._use_count() == 1


@check("_nnz", "_indices", "_values")
def _() -> None:
    x = torch.eye(3).to_sparse()
    assert x._nnz() == 3 and x._indices().shape == (2, 3) and x._values().shape == (3,)


@check("_parameters", "_buffers", "_modules", "_forward_hooks", "_forward_pre_hooks")
def _() -> None:
    model = nn.Sequential(nn.BatchNorm1d(2))
    assert {*model._modules} == {"0"}
    assert {*model[0]._parameters} == {"weight", "bias"} and "running_mean" in model[0]._buffers
    before, after = (model.register_forward_pre_hook(print), model.register_forward_hook(repr))
    assert [*model._forward_pre_hooks.values()] == [print]
    assert [*model._forward_hooks.values()] == [repr]
    before.remove()
    after.remove()


@check("_backward_hooks")
def _() -> None:
    x, model = leaf(3).exp(), nn.Linear(2, 2)
    assert not x._backward_hooks and not model._backward_hooks
    x.register_hook(abs)
    model.register_full_backward_hook(print)
    assert x._backward_hooks and model._backward_hooks


@check("_call_impl")
def _() -> None:
    class Look(nn.Module):
        def forward(self) -> list[Any]:
            frame: FrameType | None = inspect.currentframe()
            callers = []
            while frame is not None:
                callers.append((frame.f_code.co_name, frame.f_locals.get("self")))
                frame = frame.f_back
            return callers

    model = Look()
    assert ("_call_impl", model) in model()


@check("_active_ddp_module")
def _() -> None:
    assert DistributedDataParallel._active_ddp_module is None


@check("_unsafe_view", "_reshape_alias", "_to_copy", "_unsafe_index", "_unsafe_index_put")
def _() -> None:
    aten, x, first = torch.ops.aten, torch.ones(2, 3), [torch.tensor([0])]
    assert aten._unsafe_view(x, [6]).shape == aten._reshape_alias(x, [6], [1]).shape == (6,)
    assert aten._to_copy(x, dtype=torch.float64).dtype == torch.float64
    assert aten._unsafe_index(x, first).shape == (1, 3)
    assert aten._unsafe_index_put(x, first, torch.zeros(3)).sum() == 3


@check("_fused_rms_norm")
def _() -> None:
    x = torch.full((2, 3), 2.0)
    result, _ = torch.ops.aten._fused_rms_norm(x, [3], None, 0.0)
    torch.testing.assert_close(result, torch.ones(2, 3))


@check("_allow_non_fake_inputs", "_error_on_data_dependent_ops")
def _() -> None:
    constant = torch.ones(3)
    graph = make_fx(
        lambda x: x + constant,
        tracing_mode="symbolic",
        _allow_non_fake_inputs=True,
        _error_on_data_dependent_ops=True,
    )(torch.ones(3))
    assert graph(torch.ones(3)).sum() == 6


@check("_get_user_frame")
def _() -> None:
    assert inspect.signature(ShapeEnv._get_user_frame).parameters.keys() == {"self"}


@check("_bit_generator")
def _() -> None:
    assert np.random.RandomState()._bit_generator.state


@check("_key")
def _() -> None:
    assert HeteroData()["paper"]._key == "paper"


@pytest.mark.parametrize("name", CHECKS)
def test_does_what_the_library_expects(name: str) -> None:
    CHECKS[name]()


def test_each_name_has_a_check() -> None:
    module = ast.parse(HOME.read_text())
    names = {node.name for node in module.body if isinstance(node, ast.FunctionDef)}
    names |= {node.targets[0].id for node in module.body if isinstance(node, ast.Assign)}
    names |= {node.target.id for node in module.body if isinstance(node, ast.AnnAssign)}
    assert {name for name in CHECKS if not name.startswith("_")} == names


FILES = sorted({*ROOT.rglob("*.py")} - {HOME})


def test_private_names_are_reached_through_the_module() -> None:
    for path in FILES:
        reached = [name for name in dotted(ast.parse(path.read_text())) if is_private(name)]
        assert not reached, f"{path}: {reached}: name it in {HOME.name}, with a check here"


def test_private_attributes_have_a_check() -> None:
    for path in FILES:
        unknown = attributes(ast.parse(path.read_text())) - CHECKS.keys()
        assert not unknown, f"{path} reads {unknown}: add a check of what the library expects"


def is_private(name: str) -> bool:
    first, *others = name.split(".")
    operators = others[:2] == ["ops", "aten"]
    return first == "torch" and not operators and any(o[0] == "_" != o[1:2] for o in others)


def dotted(tree: ast.AST) -> Iterator[str]:
    """The names of modules and their attributes, wherever a file reaches them."""
    aliases = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield alias.name
                aliases[alias.asname or "torch"] = alias.name if alias.asname else "torch"
        elif isinstance(node, ast.ImportFrom):
            for alias in node.names:
                yield f"{node.module}.{alias.name}"
                aliases[alias.asname or alias.name] = f"{node.module}.{alias.name}"
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            first, *others = ast.unparse(node).split(".")
            if all(map(str.isidentifier, (first, *others))):
                yield ".".join([aliases.get(first, ""), *others])


OF_PYTHON = {"_replace", "_fields", "_getframe"}


def attributes(tree: ast.AST) -> set[str]:
    """Private attributes that a file reads from objects whose class it does not define."""
    nodes = [*ast.walk(tree)]
    read = {n.attr for n in nodes if isinstance(n, ast.Attribute)}
    read |= {n.arg for n in nodes if isinstance(n, ast.keyword) and n.arg is not None}
    own = {n.name for n in nodes if isinstance(n, ast.FunctionDef | ast.ClassDef)}
    own |= {n.target.id for n in nodes if isinstance(n, ast.AnnAssign) and hasattr(n.target, "id")}
    own |= {n.attr for n in nodes if is_of_self(n)}
    return {n for n in read - own - OF_PYTHON if n[0] == "_" != n[1:2]}


def is_of_self(node: ast.AST) -> bool:
    return isinstance(node, ast.Attribute) and ast.unparse(node.value) in ("self", "cls")


@pytest.mark.parametrize(
    "code",
    [
        "import torch._dynamo",
        "from torch.utils._pytree import tree_map",
        "from torch.nn.modules.batchnorm import _BatchNorm",
        "import torch\ntorch._C._current_graph_task_id()",
        "import torch.distributed as dist\ndist._tensor",
        "from torch.autograd import Variable\nVariable._execution_engine.queue_callback(f)",
    ],
)
def test_private_names_are_found(code: str) -> None:
    assert any(map(is_private, dotted(ast.parse(code))))


def test_public_names_are_not_private() -> None:
    code = "import torch\nfrom gact_graph import _x\ntorch.ops.aten._to_copy(torch.Tensor.__add__)"
    assert not any(map(is_private, dotted(ast.parse(code))))
    assert attributes(ast.parse("x._anything")) == {"_anything"}
