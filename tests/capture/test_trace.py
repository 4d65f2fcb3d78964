"""The names of contexts."""

import contextlib
import functools

import pytest
import torch
import torch.nn.functional as F
from samples import (
    FEATURES,
    GraphNet,
    Lambda,
    graph,
    make,
    one_thread,  # noqa: F401
)
from torch import nn, overrides
from torch.autograd.graph import saved_tensors_hooks
from torch.overrides import TorchFunctionMode, _get_current_function_mode
from torch.utils.checkpoint import checkpoint
from torch_geometric.nn import GATConv

import gact_graph
from gact_graph.capture.call_site import helper_of
from gact_graph.capture.nodes import attributes_of
from gact_graph.capture.trace import Call, Trace

X, EDGES = graph()
AS_PYG = {"min_bytes": 0, "blocks": False}
"""Any step is compressed, and layers run as PyG has them."""
NORM = ("input", "result1", "result2")


def slots(model):
    return [row.slot for row in gact_graph.report(model).contexts]


def after(model, *inputs):
    model(*inputs).sum().backward()
    return slots(model)


class TestSlots:
    def test_of_a_gat_net(self):
        model = gact_graph.wrap(make(lambda: GraphNet("gat")), **AS_PYG)
        names = after(model, X, EDGES)
        expected = {
            "convs.0/message/mul.other",
            "convs.0/edge_update/leaky_relu.input",
            "convs.0/edge_update/softmax.exp.result",
            "convs.0/index_select.index",
            "norm/batch_norm.input",
            "relu.result",
            "convs.1/lin/linear.input",
        }
        assert expected <= set(names)
        assert len(set(names)) == len(names)

    @pytest.mark.parametrize("kind", ["gcn", "gat", "sage", "gin"])
    def test_are_the_same_at_each_step_and_size(self, kind):
        model = gact_graph.wrap(make(lambda: GraphNet(kind)), **AS_PYG)
        first = after(model, X, EDGES)
        assert after(model, X, EDGES) == first
        sizes = [graph(400, 2600, seed=1), graph(350, 3000, seed=2)]
        assert [after(model, *sampled) for sampled in sizes] == [first, first]

    def test_do_not_depend_on_bits(self):
        def run(bits):
            return after(gact_graph.wrap(make(GraphNet), bits=bits, **AS_PYG), X, EDGES)

        assert run(2) == run(32)

    def test_of_a_shared_module(self):
        class Twice(nn.Module):
            def __init__(self):
                super().__init__()
                self.lin = nn.Linear(FEATURES, FEATURES)
                self.alias = self.lin

            def forward(self, x):
                return self.alias(self.lin(self.lin(x).tanh()).tanh())

        model = gact_graph.wrap(Twice(), **AS_PYG)
        names = after(model, X)
        # The input of the first call is the model's own; tanh#2 and linear#3 save one tensor.
        assert names == ["tanh.result", "tanh#2.result"]
        exact = gact_graph.wrap(Twice(), bits=32, **AS_PYG)
        assert after(exact, X) == names

    def test_of_a_shared_module_that_saves(self):
        class Twice(nn.Module):
            def __init__(self):
                super().__init__()
                self.lin = nn.Linear(FEATURES, FEATURES)

            def forward(self, x):
                return self.lin(self.lin(self.lin(x)))

        model = gact_graph.wrap(Twice(), **AS_PYG)
        assert after(model, X) == ["lin/linear#2.input", "lin/linear#3.input"]
        assert after(model, X) == ["lin/linear#2.input", "lin/linear#3.input"]

    def test_of_an_autograd_function(self):
        class Square(torch.autograd.Function):
            @staticmethod
            def forward(ctx, h):
                ctx.save_for_backward(h)
                return h * h

            @staticmethod
            def backward(ctx, grad):
                return 2 * grad * ctx.saved_tensors[0]

        def forward(module, x):
            return Square.apply(Square.apply(x @ module.weight))

        model = gact_graph.wrap(Lambda(forward), **AS_PYG)
        assert after(model, X) == ["function.saved", "function#2.saved"]

    def test_of_functions_at_the_root(self):
        def forward(module, x):
            h = F.silu((x @ module.weight).roll(1))  # no operation that is computed again
            return torch.stack([h.exp(), torch.sigmoid(input=h)]).amax(0)

        names = after(gact_graph.wrap(Lambda(forward), **AS_PYG), X)
        assert "silu.derivative" in names
        assert "exp.result" in names
        assert "sigmoid.result" in names
        assert not any("/" in name for name in names)

    def test_nested_paths_are_relative_to_the_caller(self):
        class Outer(nn.Module):
            def __init__(self):
                super().__init__()
                self.block = nn.Module()
                self.block.inner = nn.ModuleDict({"conv": GATConv(FEATURES, 32)})
                self.block1 = nn.Linear(32, 32)

            def forward(self, x, edge_index):
                return self.block1(self.block.inner["conv"](x, edge_index).tanh().exp())

        names = after(gact_graph.wrap(Outer(), **AS_PYG), X, EDGES)
        assert "block.inner.conv/edge_update/softmax.exp.result" in names
        assert "exp.result" in names


class TestExceptions:
    @pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
    @pytest.mark.parametrize("where", ["root", "submodule", "loss of a hook"])
    def test_leave_nothing_on_the_stack(self, error, where):
        class Failing(GraphNet):
            fail = False

            def forward(self, x, edge_index):
                h = self.norm(self.convs[0](x, edge_index))
                if self.fail and where == "root":
                    raise error("on purpose")
                return self.convs[1](h.relu(), edge_index)

        def hook(*_):
            if model.fail:
                raise error("on purpose")

        model = make(Failing)
        if where == "submodule":
            model.convs[0].lin.register_forward_hook(hook)
        elif where != "root":
            model.convs[0].lin.register_forward_pre_hook(hook)
        gact_graph.wrap(model, adaptive=False, **AS_PYG)
        names = after(model, X, EDGES)
        before = gact_graph.report(model)
        model.fail = True
        with pytest.raises(error, match="on purpose"):
            model(X, EDGES)
        leaf = torch.ones(5000, requires_grad=True)
        saved = leaf.exp()
        # Autograd itself holds the tensor: the error is its own, without our words.
        saved.detach().mul_(2)
        with pytest.raises(RuntimeError, match="modified by an inplace operation") as caught:
            saved.sum().backward()
        assert "saved at" not in str(caught.value)
        current = torch.overrides._get_current_function_mode_stack()
        assert current == []
        assert gact_graph.report(model).contexts is before.contexts
        model.fail = False
        assert after(model, X, EDGES) == names

    def test_that_the_model_catches(self):
        class Retrying(nn.Module):
            def __init__(self):
                super().__init__()
                self.block = nn.Sequential(nn.Linear(FEATURES, 64), nn.Linear(64, FEATURES))
                self.last = nn.Linear(FEATURES, 8)

            def forward(self, x):
                with contextlib.suppress(ValueError):
                    self.block(x)
                return self.last(self.last.weight.sum() + x * self.last.bias.mean())

        def hook(module, args):
            raise ValueError

        for target in ("block", "block.0", "block.1"):
            model = Retrying()
            model.get_submodule(target).register_forward_pre_hook(hook)
            gact_graph.wrap(model, **AS_PYG)
            assert after(model, X) == ["last/linear.input"]

    def test_a_hook_that_stops_a_submodule_does_not_leave_its_parent(self):
        class Inner(nn.Module):
            def __init__(self):
                super().__init__()
                self.bad = nn.Linear(FEATURES, FEATURES)
                self.good = nn.Linear(FEATURES, FEATURES)

            def forward(self, x):
                try:
                    return self.bad(x)
                except ValueError:
                    return self.good(x).exp()

        def hook(module, args):
            raise ValueError

        model = nn.Sequential(Inner())
        model[0].bad.register_forward_pre_hook(hook)
        gact_graph.wrap(model, **AS_PYG)
        # Kept, for it is the output, and named by the module that made it.
        assert after(model, X) == ["0/exp.result"]


class Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x, x * 2)
        return x * 2

    @staticmethod
    def backward(ctx, grad):
        return 2 * grad


def in_place(x):
    y = x * 1
    y[:, :2].sigmoid_()
    return y


class TestNodes:
    """The names of saved tensors, as autograd nodes have them."""

    @pytest.mark.parametrize(
        ("function", "names"),
        [
            (lambda x: x * x.t(), {("mul", "self"), ("mul", "other")}),
            (lambda x: F.linear(x, x, x[0]), {("addmm", "mat1"), ("addmm", "mat2")}),
            (lambda x: torch.sigmoid_(x * 1), {("sigmoid", "result")}),
            (lambda x: x[torch.tensor([0, 1])], {("index", "indices.0")}),
            (lambda x: (x.exp(), [x], x.sin()), {("exp", "result"), ("sin", "self")}),
            (lambda x: F.avg_pool2d(x[None], 2), {("avg_pool2d", "self")}),
            (lambda x: F.layer_norm(x, (4,)), {("native_layer_norm", n) for n in NORM}),
            (Doubled.apply, {("", "tensors.0"), ("", "tensors.1")}),
            (in_place, set()),
            (lambda x: None, set()),
        ],
    )
    def test_of_an_operation(self, function, names):
        held = []

        def pack(tensor):
            held.append([tensor.detach()])
            return held[-1]

        x = torch.randn(4, 4, requires_grad=True).exp()
        since = torch.autograd._get_sequence_nr()
        with saved_tensors_hooks(pack, lambda packed: pytest.fail("it was unpacked")):
            result = function(x)
        places = attributes_of(result, since)
        saved = [places[id(packed)] for packed in held if id(packed) in places]
        assert {(place.operation, place.name) for place in saved} == names

    def test_nodes_made_before_are_not_looked_at(self):
        x = torch.randn(4, 4, requires_grad=True).exp()
        result = x.sin()
        assert attributes_of(result, torch.autograd._get_sequence_nr()) == {}
        assert {p.operation for p in attributes_of(result, 0).values()} == {"exp", "sin"}

    def test_a_checkpoint_does_not_run_again(self):
        runs = []

        def function(x):
            runs.append(x)
            return x.exp().sin()

        x = torch.randn(4, requires_grad=True)
        attributes_of(checkpoint(function, x, use_reentrant=False), 0)
        assert len(runs) == 1


@torch.library.custom_op("gact_graph_test_trace::relu", mutates_args=())
def _relu(x: torch.Tensor) -> torch.Tensor:
    return x.clone()


class TestCall:
    def test_names_of_special_methods(self):
        assert Call(torch.Tensor.__matmul__, (), {}).name == "matmul"
        assert Call(torch.Tensor.relu_, (), {}).name == "relu"

    def test_a_callable_without_a_name(self):
        class Op:
            def __call__(self, x):
                return x

        assert Call(Op(), (), {}).name == f"{__name__.partition('.')[0]}.Op"

    @pytest.mark.parametrize(
        ("function", "name"),
        [
            (torch.add, "add"),
            (torch.Tensor.__radd__, "radd"),
            (torch.Tensor.add_, "add"),
            (torch.ops.aten.relu, "relu"),
            (torch.ops.aten.relu.default, "relu.default"),
            (torch.ops.prims.sin, "sin"),
            (torch.ops.gact_graph_test_trace.relu, "gact_graph_test_trace.relu"),
            (torch.ops.gact_graph_test_trace.relu.default, "gact_graph_test_trace.relu.default"),
        ],
    )
    def test_operators_of_others_name_their_origin(self, function, name):
        assert Call(function, (), {}).name == name

    def test_functions_of_others_name_their_origin(self):
        def relu(x):
            return overrides.handle_torch_function(relu, (x,), x)

        @functools.wraps(F.relu)
        def wrapper(x):
            return relu(x)

        nameless = {}
        exec("def relu(x): return x", nameless)
        expected = f"{__name__.partition('.')[0]}.relu"
        assert [Call(f, (), {}).name for f in (relu, wrapper)] == [expected, expected]
        assert Call(nameless["relu"], (), {}).name == "None.relu"

    def test_functions_of_torch_have_their_own_names(self):
        functions = [f for f in overrides.get_testing_overrides() if callable(f)]
        names = {Call(function, (), {}).name for function in functions}
        assert {"add", "relu", "linear", "gelu", "special_erf", "einsum"} <= names
        # PyG puts methods of its own in their place, which call them.
        assert not [n for n in names if "." in n and not n.startswith("torch_geometric.")]

    @pytest.mark.parametrize("namespace", ["torch_sparse", "pyg"])
    def test_operators_of_pyg_have_the_names_of_tables(self, namespace):
        attributes = {"__name__": "spmm_sum", "__module__": f"torch._ops.{namespace}"}
        assert Call(type("Operator", (), attributes)(), (), {}).name == "spmm_sum"

    def test_tensors_of_its_own(self):
        a = torch.randn(6, 3)
        call = Call(torch.mul, (), {})
        call.tensors = {"query": a[:2], "key": a[2:]}
        assert call.position_of(a[2:], None) == "key"
        assert call.position_of(a[2:].t(), None) == "key"
        assert call.position_of(torch.randn(3), None) == "saved"


def test_in_place_operations_are_named_and_right():
    def forward(module, x):
        h = F.elu_(x @ module.weight)
        return torch.relu_(F.dropout(h * 2, 0.5, training=True, inplace=True)).sum()

    model = gact_graph.wrap(Lambda(forward), bits=32, **AS_PYG)
    plain = Lambda(forward)
    for net in (model, plain):
        torch.manual_seed(0)
        net(X).backward()
    assert torch.equal(model.weight.grad, plain.weight.grad)
    assert any(name.startswith("elu.") for name in slots(model))


@pytest.mark.parametrize(
    ("functions", "name"),
    [
        (["softmax"], "softmax"),
        (["scatter", "softmax"], "softmax"),
        # What PyG does not publish may be renamed, and is passed over.
        (["broadcast", "scatter", "<listcomp>", "softmax", "_wrapper"], "softmax"),
        (["scatter", "_private"], "scatter"),
        (["broadcast", "_private"], "private"),
        ([], ""),
    ],
)
def test_a_helper_goes_by_the_name_that_pyg_publishes(functions, name):
    assert helper_of(functions) == name


class Names(TorchFunctionMode):
    """Notes the names of the functions of torch that run."""

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_function__(self, func, types, args=(), kwargs=None):
        self.names.append(func.__name__)
        return func(*args, **(kwargs or {}))


class TestPaused:
    @pytest.mark.parametrize("inside", [False, True], ids=["innermost", "within another mode"])
    def test_operations_are_not_followed_until_it_ends(self, inside):
        followed, names = [], Names()
        trace = Trace(lambda call, result: followed.append(call.name))
        x = torch.ones(2)
        with trace, names if inside else contextlib.nullcontext():
            with trace.paused():
                x.exp()
            x.sin()
        assert followed == ["sin"]
        assert names.names == (["exp", "sin"] if inside else [])
        assert torch._C._len_torch_function_stack() == 0

    def test_it_does_not_run_as_the_innermost_mode(self):
        trace = Trace(lambda call, result: None)
        with Names() as names, trace, trace.paused():
            assert torch._C._len_torch_function_stack() == 1
            torch.ones(2).exp()
        assert "exp" in names.names

    def test_an_exception_leaves_all_modes_as_they_were(self):
        followed = []
        trace = Trace(lambda call, result: followed.append(call.name))
        with Names(), trace:
            with pytest.raises(KeyError), trace.paused():
                raise KeyError
            torch.ones(2).sin()
        assert followed == ["ones", "sin"]
        assert torch._C._len_torch_function_stack() == 0

    def test_ended_while_it_stands_aside_it_leaves_the_modes_of_others(self):
        names, trace = Names(), Trace(lambda call, result: None)
        with names:
            trace.__enter__()
            with trace.paused():
                trace.__exit__(None, None, None)  # as an interrupt has it
                assert _get_current_function_mode() is names
            trace.__exit__(None, None, None)
        assert torch._C._len_torch_function_stack() == 0

    def test_a_mode_that_torch_puts_back_after_the_end_follows_nothing(self):
        followed, own = [], []
        trace = Trace(lambda call, result: followed.append(call.name))
        with contextlib.closing(trace), trace:
            # As in a function of torch that a signal interrupts and whose traceback is still held.
            function = overrides._pop_mode_temporarily()
            function.__enter__()
        function.__exit__(None, None, None)
        assert _get_current_function_mode() is trace
        torch.ones(2).sin()
        assert not followed
        with Trace(lambda call, result: own.append(call.name)):
            torch.ones(2).sin()
        assert own == ["ones", "sin"] and not followed
        assert torch._C._len_torch_function_stack() == 0


def test_code_without_a_name_asks_for_the_place_of_memory():
    names = {}
    exec("def place(x): return x.data_ptr(), x.untyped_storage().nbytes()", names)

    def forward(module, x):
        h = x @ module.weight
        assert names["place"](h) == (h.data_ptr(), h.nbytes)
        return h

    assert after(gact_graph.wrap(Lambda(forward), **AS_PYG), X) == []


def test_attention_calls_the_functions_that_torch_has_now(monkeypatch):
    """A module of torch that is written in Python, and a patch between two of its calls."""
    calls, stock = [], F.scaled_dot_product_attention

    def patched(query, *args, **kwargs):
        calls.append(query.shape)
        return 2 * stock(query, *args, **kwargs)

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.attention = nn.MultiheadAttention(FEATURES, 2, batch_first=True)

        def forward(self, x):
            return self.attention(x, x, x, need_weights=False)[0]

    net, wrapped = make(Net), gact_graph.wrap(make(Net), bits=32, **AS_PYG)
    x = X[None, :100]
    before = net(x)
    assert torch.equal(wrapped(x), before) and not calls
    monkeypatch.setattr(F, "scaled_dot_product_attention", patched)
    expected = net(x)
    assert len(calls) == 1 and not torch.equal(expected, before)
    assert torch.equal(wrapped(x), expected)
    assert len(calls) == 2
    monkeypatch.undo()
    assert torch.equal(wrapped(x), before) and len(calls) == 2
