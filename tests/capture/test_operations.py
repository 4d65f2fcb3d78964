"""The tensors that backward reads: checked on stock autograd, with unchanged gradients."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from samples import FEATURES, Lambda, equal, graph, one_thread, seeded  # noqa: F401
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from zoo import csr

import gact_graph
from gact_graph.capture.nodes import attributes_of
from gact_graph.capture.operations import reads_of
from gact_graph.capture.sides import find_tests
from gact_graph.capture.trace import Call
from gact_graph.codecs.reads import EXACT, Side

SIZE = 4096
SPECIAL = (0.0, -0.0, 0.5, -0.5, 1.0, -1.0, 6.0, math.inf, -math.inf, 0.1, -0.1, 20.0)

SIGN_ONLY = {
    "relu": (torch.relu, 1),
    "Tensor.relu": (lambda h: h.relu(), 1),
    "relu_": (lambda h: (h * 1).relu_(), 1),
    "F.relu inplace": (lambda h: F.relu(h * 1, inplace=True), 1),
    "nn.ReLU": (nn.ReLU(), 1),
    "leaky_relu": (F.leaky_relu, 1),
    "leaky_relu slope": (lambda h: F.leaky_relu(h, negative_slope=-0.3), 1),
    "leaky_relu inplace": (lambda h: F.leaky_relu(h * 1, 0.2, inplace=True), 1),
    "threshold": (lambda h: F.threshold(h, 0.125, 20.0), 1),
    "relu6": (F.relu6, 1),
    "hardtanh": (F.hardtanh, 1),
    "hardtanh bounds": (lambda h: F.hardtanh(h, min_val=-0.5, max_val=0.5), 1),
    "clamp": (lambda h: h.clamp(-0.5, 0.5), 1),
    "clamp min": (lambda h: torch.clamp(h, min=0.1), 1),
    "clamp max": (lambda h: h.clamp(max=0.1), 1),
    "clamp_min": (lambda h: h.clamp_min(0.1), 1),
    "clamp_max": (lambda h: torch.clamp_max(h, 0.1), 1),
    "abs": (torch.abs, 2),
}


def run(function, dtype=torch.float32, **options):
    """The gradient of a function of values that hold every bound, and the rows of the report."""
    scale = torch.ones((), dtype=dtype)
    model = Lambda(lambda module, x: function(x.to(dtype) * module.scale.expand_as(x)))
    model.scale = nn.Parameter(scale)
    x = torch.randn(SIZE, generator=seeded(1))
    x[: len(SPECIAL)] = torch.tensor(SPECIAL)
    x.requires_grad_()
    if options:
        gact_graph.wrap(model, min_bytes=0, **options)
    out = model(x)
    out.backward(torch.randn(out.shape, generator=seeded(2)).to(out.dtype))
    rows = gact_graph.report(model).contexts if options else []
    return x.grad, rows


class TestSides:
    @pytest.mark.parametrize("level", ["lossless", "L1"])
    @pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
    @pytest.mark.parametrize("name", SIGN_ONLY)
    def test_one_bit_and_the_same_gradient(self, name, dtype, level):
        function, bits = SIGN_ONLY[name]
        stock, _ = run(function, dtype)
        got, rows = run(function, dtype, level=level, bits=2 if level == "L1" else 32)
        assert torch.equal(got, stock)
        masks = [row for row in rows if row.codec == "mask"]
        assert [row.stored_bytes for row in masks] == [SIZE * bits // 8]

    @pytest.mark.parametrize("name", ["relu", "leaky_relu", "threshold"])
    def test_nan_goes_the_same_way(self, name):
        def function(h):
            return SIGN_ONLY[name][0](h + torch.tensor([math.nan, 0.0]).repeat(SIZE // 2))

        assert torch.equal(run(function)[0], run(function, level="lossless", bits=32)[0])

    def test_double_backward(self):
        def penalty(**options):
            model = Lambda(lambda module, x: F.leaky_relu(torch.relu(x @ module.weight) - 0.1))
            if options:
                gact_graph.wrap(model, min_bytes=0, **options)
            x = torch.randn(300, FEATURES, generator=seeded(1)).requires_grad_()
            (grad,) = torch.autograd.grad(model(x).square().sum(), x, create_graph=True)
            grad.square().sum().backward()
            return model.weight.grad

        assert torch.equal(penalty(), penalty(level="lossless", bits=32))

    @pytest.mark.parametrize("bounds", [(-math.inf, 0.5), (-0.5, math.inf), (-math.inf, math.inf)])
    def test_infinite_bounds(self, bounds):
        def function(h):
            return F.hardtanh(h, *bounds)

        assert torch.equal(run(function, level="lossless", bits=32)[0], run(function)[0])

    @pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
    @pytest.mark.parametrize(
        "function", [lambda h: F.hardtanh(h, -0.1, 0.3), lambda h: F.threshold(h, 0.1, 20.0)]
    )
    def test_bounds_that_the_type_cannot_hold(self, function, dtype):
        stock, _ = run(function, dtype)
        got, rows = run(function, dtype, bits=2)
        assert torch.equal(got, stock)
        name = function(torch.zeros(1, requires_grad=True)).grad_fn.name().lower()[:8]
        assert {row.codec for row in rows if row.slot.startswith(name)} == {"keep"}

    def test_bounds_that_are_tensors_are_compared_exactly(self):
        def function(h):
            return torch.clamp(h, torch.full_like(h, -0.5), torch.full_like(h, 0.5))

        assert torch.equal(run(function)[0], run(function, bits=2)[0])


X, EDGES = graph()
ROWS = EDGES[1][:, None].expand(-1, FEATURES)


def segments(h, reduce):
    return torch.segment_reduce(h * 2, reduce, offsets=torch.arange(0, 301, 2), axis=0)


def scattered(h, reduce):
    into = h.new_zeros(300, FEATURES)
    return into.scatter_reduce_(0, ROWS, h[EDGES[0]] * 2, reduce=reduce, include_self=False)


def product(h, reduce):
    return torch.sparse.mm(csr(), h, reduce)


IN_VAIN = [
    *((product, r) for r in ("sum", "mean", "amax", "amin")),
    *((scattered, r) for r in ("sum", "mean")),
    *((segments, r) for r in ("sum", "mean")),
]


class Squared(nn.Module):
    def __init__(self, function):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(FEATURES, FEATURES, generator=seeded(3)))
        self.function = function

    def forward(self, x):
        return self.function(x @ self.weight)


def backward(model):
    out = model(X)
    out.backward(torch.randn(out.shape, generator=seeded(2)))
    return model.weight.grad


class TestNothing:
    @pytest.mark.parametrize(("function", "reduce"), IN_VAIN)
    def test_stock_backward_does_not_read_it(self, function, reduce):
        """Dropped tensors, spoiled in stock autograd, change no gradient."""
        expected = backward(Squared(lambda h: function(h, reduce)))
        model = gact_graph.wrap(
            Squared(lambda h: function(h, reduce)), level="lossless", bits=32, min_bytes=0
        )
        assert torch.equal(backward(model), expected)
        dropped = [row for row in gact_graph.report(model).contexts if row.codec == "drop"]
        assert dropped
        names = {row.slot.rpartition(".")[2] for row in dropped}
        held = []

        class Packed:
            def __init__(self, tensor):
                self.tensor = tensor.detach()
                held.append(self)

        stock = Squared(lambda h: function(h, reduce))
        with saved_tensors_hooks(Packed, lambda packed: packed.tensor):
            out = stock(X)
        places, spoiled = attributes_of(out, 0), set()
        for packed in held:
            place = places[id(packed)]
            position = "input" if place.name == "self" else place.name
            if "reduce" in place.operation and position in names:
                packed.tensor = torch.full_like(packed.tensor, math.nan)
                spoiled.add(position)
        out.backward(torch.randn(out.shape, generator=seeded(2)))
        assert spoiled == names
        assert torch.equal(stock.weight.grad, expected)

    def test_the_dense_side_is_read_where_the_values_learn(self):
        class Learned(Squared):
            def __init__(self):
                super().__init__(None)
                self.values = nn.Parameter(torch.rand(csr().values().numel(), generator=seeded(4)))

            def forward(self, x):
                a = csr()
                parts = (a.crow_indices(), a.col_indices(), self.values)
                a = torch.sparse_csr_tensor(*parts, a.shape, check_invariants=False)
                return torch.sparse.mm(a, x @ self.weight, "sum")

        def gradients(model):
            backward(model)
            return [p.grad for p in model.parameters()]

        stock = gradients(Learned())
        model = gact_graph.wrap(Learned(), level="lossless", bits=32, min_bytes=0)
        assert equal(gradients(model), stock)
        assert "drop" not in {row.codec for row in gact_graph.report(model).contexts}


COMPARED = {
    "scatter amax": lambda h: scattered(h, "amax"),
    "scatter amin": lambda h: scattered(h, "amin"),
    "amax": lambda h: h.amax(0),
    "max": lambda h: h.max(1).values,
    "maximum": lambda h: torch.maximum(h, -h),
    "segment max": lambda h: torch.segment_reduce(
        h, "max", offsets=torch.arange(0, 301, 10), axis=0
    ),
    "cummax": lambda h: h.cummax(0).values,
    "aminmax": lambda h: torch.stack(torch.aminmax(h, dim=1)),
    "norm of infinity": lambda h: h.norm(math.inf, dim=1),
    "vector_norm of infinity": lambda h: torch.linalg.vector_norm(h, ord=math.inf, dim=1),
    "dist of infinity": lambda h: torch.dist(h, h.flip(0), math.inf),
    "pdist of infinity": lambda h: F.pdist(h, math.inf),
}


class TestExact:
    @pytest.mark.parametrize("name", COMPARED)
    def test_compared_tensors_have_no_noise(self, name):
        got = backward(gact_graph.wrap(Squared(COMPARED[name]), bits=2, min_bytes=0))
        assert torch.equal(got, backward(Squared(COMPARED[name])))


class TestDivisors:
    def test_are_rounded_to_16_bits(self):
        def quotient(h):
            return h.exp() / (h.sigmoid() + 0.01)

        model = gact_graph.wrap(Squared(quotient), bits=2, adaptive=False, min_bytes=0)
        backward(model)
        widths = {row.slot: row.bits for row in gact_graph.report(model).contexts}
        assert widths["div.other"] == 16
        assert widths["exp.result"] == 4


class TestPrelu:
    def test_no_element_crosses_zero(self):
        def backward_of(**options):
            model = Lambda(lambda module, x: F.prelu(x @ module.weight, torch.tensor([0.25])))
            if options:
                gact_graph.wrap(model, min_bytes=0, **options)
            x = torch.randn(300, FEATURES, generator=seeded(1))
            model(x).backward(torch.ones(300, 64))
            return model.weight.grad

        assert torch.equal(backward_of(bits=2), backward_of())


@torch.library.custom_op("gact_graph_test_operations::leaky_relu", mutates_args=())
def _leaky_relu(x: torch.Tensor) -> torch.Tensor:
    return F.softplus(x)


def test_tables_are_those_of_torch_where_no_node_shows_the_tensor():
    """As the nodes of operators that are written in C++."""
    x = torch.randn(300, 32)
    stock, other = torch.ops.aten.leaky_relu, torch.ops.gact_graph_test_operations.leaky_relu
    find_tests()
    assert isinstance(reads_of(Call(stock, (x,), {}), "saved", x, None), Side)
    assert reads_of(Call(other, (x,), {}), "saved", x, None) is EXACT
