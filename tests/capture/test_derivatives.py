"""Pointwise operations save their derivative: gradients without bias, and all else as before."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from samples import Lambda, one_thread, seeded  # noqa: F401
from torch import Tensor, nn
from torch.autograd import forward_ad

import gact_graph

SHAPE = (300, 32)

CURVED = {
    "gelu": F.gelu,
    "gelu tanh": lambda h: F.gelu(h, approximate="tanh"),
    "silu": F.silu,
    "mish": F.mish,
    "softplus": lambda h: F.softplus(h, beta=3),
    "elu": F.elu,
    "selu": torch.selu,
    "celu": F.celu,
    "logsigmoid": F.logsigmoid,
    "hardswish": F.hardswish,
    "softsign": F.softsign,
    "tanhshrink": F.tanhshrink,
    "pow 3": lambda h: h**3,
    "pow 1.5": lambda h: h.abs().detach().add(h - h.detach()).pow(1.5),
    "sin": torch.sin,
    "cos": torch.cos,
    "atan": torch.atan,
    "asinh": torch.asinh,
    "sinh": torch.sinh,
    "cosh": torch.cosh,
    "erf": torch.erf,
    "in place elu": lambda h: F.elu(h + 0, inplace=True),
    "in place silu": lambda h: nn.SiLU(inplace=True)(h + 0),
    "in place sin": lambda h: (h + 0).sin_(),
    "in place power": lambda h: (h + 0).pow_(3),
    "by keyword": lambda h: torch.sin(input=h),
}
STEPS = {
    "hardsigmoid": F.hardsigmoid,
    "hardshrink": F.hardshrink,
    "softshrink": F.softshrink,
}


class Net(nn.Module):
    """A function of a parameter, kept apart from the parameter's and the output's memory."""

    def __init__(self, function) -> None:
        super().__init__()
        self.function = function
        self.weight = nn.Parameter(torch.randn(SHAPE, generator=seeded(1)))

    def forward(self) -> Tensor:
        return self.function(self.weight + 0) + 0


def step(model: Net) -> tuple[Tensor, Tensor]:
    model.weight.grad = None
    out = model()
    out.backward(torch.randn(SHAPE, generator=seeded(2)))
    return out.detach(), model.weight.grad


def slots(model: nn.Module) -> dict[str, str]:
    return {row.slot: row.codec for row in gact_graph.report(model).contexts}


class TestGradient:
    @pytest.mark.parametrize("name", CURVED)
    def test_is_right_on_average(self, name):
        """With noise in the argument, the mean was off by 7 % (hardswish) to 70 % (softsign)."""
        exact = step(Net(CURVED[name]))[1]
        model = gact_graph.wrap(Net(CURVED[name]), bits=2, adaptive=False, min_bytes=0)
        draws = 50
        added = torch.stack([step(model)[1] - exact for _ in range(draws)]).double()
        # The square of the mean, without what is left of the variance in it.
        squares, square = added.square().sum(), added.sum(0).square().sum()
        bias = (square - squares) / (draws * (draws - 1)) / exact.double().square().sum()
        assert squares > 0
        assert bias < 1e-3

    @pytest.mark.parametrize("name", CURVED | STEPS)
    def test_forward_is_unchanged(self, name):
        function = (CURVED | STEPS)[name]
        model = gact_graph.wrap(Net(function), bits=4, adaptive=False, min_bytes=0)
        assert torch.equal(step(model)[0], step(Net(function))[0])

    @pytest.mark.parametrize("name", STEPS)
    def test_of_two_values_is_exact_in_one_bit(self, name):
        model = gact_graph.wrap(Net(STEPS[name]), bits=4, adaptive=False, min_bytes=0)
        assert torch.equal(step(model)[1], step(Net(STEPS[name]))[1])
        [row] = gact_graph.report(model).contexts
        assert (row.codec, row.stored_bytes) == ("mask", 9600 // 8)

    def test_takes_as_many_bits_as_the_argument(self):
        model = gact_graph.wrap(Net(F.gelu), bits=2, adaptive=False, min_bytes=0)
        step(model)
        [row] = gact_graph.report(model).contexts
        assert (row.slot, row.bits, row.raw_bytes) == ("gelu.derivative", 2, 9600 * 4)
        assert row.stored_bytes == 9600 * 2 // 8 + 38 * 4

    def test_poles_are_near_each_other(self):
        """1 / (1 + x) from 1e-6 to 1e3: the error is relative to each."""

        def function(h):
            return (10.0 ** (h.argsort(0) * (9 / 299) - 6) - 1 + h - h.detach()).log1p()

        exact = step(Net(function))[1]
        got = step(gact_graph.wrap(Net(function), bits=2, adaptive=False, min_bytes=0))[1]
        assert ((got - exact) / exact).abs().max() < 0.01

    @pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16])
    def test_other_dtypes(self, dtype):
        exact = step(Net(F.silu))[1]
        got = step(gact_graph.wrap(Net(F.silu).to(dtype), bits=8, adaptive=False, min_bytes=0))[1]
        assert got.dtype == dtype
        assert (got.float() - exact).norm() < 0.02 * exact.norm()

    def test_autocast(self):
        def function(h):
            return F.softplus(h @ torch.eye(32))

        exact = step(Net(function))[1]
        model = gact_graph.wrap(Net(function), bits=8, adaptive=False, min_bytes=0)
        with torch.autocast("cpu", torch.bfloat16):
            out, got = step(model)
        assert torch.equal(out, self.out_under_autocast(function))
        assert (got - exact).norm() < 0.02 * exact.norm()

    @staticmethod
    def out_under_autocast(function) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return step(Net(function))[0]

    def test_twice_over_one_graph(self):
        model = gact_graph.wrap(Net(F.gelu), bits=2, adaptive=False, min_bytes=0)
        out = model()
        first, second = (
            torch.autograd.grad(out.sum(), model.weight, retain_graph=True)[0] for _ in range(2)
        )
        assert torch.equal(first, second)


class TestStockWhere:
    def saved(self, function, **options) -> dict[str, str]:
        defaults = {"bits": 4, "adaptive": False, "min_bytes": 0}
        model = gact_graph.wrap(Net(function), **defaults | options)
        step(model)
        return slots(model)

    @pytest.mark.parametrize(
        "options", [{"level": "lossless"}, {"pin": {"gelu.*": 32}}, {"min_bytes": 1 << 20}]
    )
    def test_nothing_is_to_be_lost(self, options):
        assert self.saved(F.gelu, **options) == {"gelu.input": "keep"}

    def test_the_derivative_is_linear(self):
        assert self.saved(lambda h: h**2) == {"pow.input": "quantize"}

    def test_the_argument_was_gathered(self):
        """Rows of a tensor of nodes take no memory of their own; derivatives of edges would."""
        rows = torch.arange(300).repeat(8)

        def function(h):
            return F.silu((h * 2).index_select(0, rows)).view(8, 300, 32).sum(0)

        assert self.saved(function)["silu.input"] == "gather"

    def test_the_exponent_learns(self):
        model = Lambda(lambda module, x: (x.exp() + 0).pow(module.weight[0, 0]) + 0)
        gact_graph.wrap(model, bits=4, adaptive=False, min_bytes=0)
        model(torch.randn(SHAPE)).sum().backward()
        assert "pow.input" in slots(model)

    def test_forward_mode(self):
        def tangent(model: nn.Module) -> Tensor:
            with forward_ad.dual_level():
                dual = forward_ad.make_dual(torch.ones(SHAPE), torch.ones(SHAPE))
                return forward_ad.unpack_dual(model(dual)).tangent

        function = Lambda(lambda module, x: F.gelu(x + module.weight.sum()) + 0)
        stock = tangent(function)
        assert torch.equal(
            tangent(gact_graph.wrap(function, bits=4, adaptive=False, min_bytes=0)), stock
        )


class TestDoubleBackward:
    def penalty(self, **options) -> Tensor:
        """The gradient of a penalty on the gradient of the input, as forces are trained."""
        model = Lambda(lambda module, x: F.silu(x @ module.weight).sum(1))
        if options:
            gact_graph.wrap(model, adaptive=False, min_bytes=0, **options)
        x = torch.randn(300, 32, generator=seeded(4)).requires_grad_()
        [gradient] = torch.autograd.grad(model(x).sum(), x, create_graph=True)
        gradient.square().sum().backward()
        return model.weight.grad

    def test_of_an_input(self):
        exact, got = self.penalty(), self.penalty(bits=8)
        assert (got - exact).norm() < 0.02 * exact.norm()

    def test_of_parameters_is_refused(self):
        model = gact_graph.wrap(Net(F.silu), bits=4, adaptive=False, min_bytes=0)
        with pytest.warns(RuntimeWarning, match="create_graph=True read tensors"):
            [gradient] = torch.autograd.grad(model().sum(), model.weight, create_graph=True)
        words = r"Expected one backward through silu .* with pin={'silu\.\*': 32}"
        with pytest.raises(RuntimeError, match=words):
            torch.autograd.grad(gradient.sum(), model.weight, retain_graph=True)
        with pytest.raises(RuntimeError, match=words):
            gradient.sum().backward()

    def test_of_parameters_with_the_argument_kept(self):
        def curvature(model: Net) -> Tensor:
            [gradient] = torch.autograd.grad(model().sum(), model.weight, create_graph=True)
            gradient.sum().backward()
            return model.weight.grad

        wrapped = gact_graph.wrap(
            Net(F.silu), bits=4, adaptive=False, pin={"silu.*": 32}, min_bytes=0
        )
        assert torch.equal(curvature(wrapped), curvature(Net(F.silu)))


def test_outputs_without_gradient_pass_none_on():
    """As in stock: zeros would reach the parameters before, and the optimizer would move them."""

    class Ignores(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, y):
            ctx.set_materialize_grads(False)
            return x + y

        @staticmethod
        def backward(ctx, gradient):
            return None, gradient

    model = torch.nn.ModuleDict({"first": torch.nn.Linear(32, 64), "last": torch.nn.Linear(32, 64)})

    class Net(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.parts = model

        def forward(self, x):
            return Ignores.apply(torch.nn.functional.elu(self.parts["first"](x)), model["last"](x))

    net = gact_graph.wrap(Net(), bits=4, adaptive=False, min_bytes=0)
    net(torch.randn(300, 32)).sum().backward()
    assert model["first"].weight.grad is None and model["last"].weight.grad is not None


@torch.library.custom_op("gact_graph_test_derivatives::silu", mutates_args=())
def _silu(x: Tensor) -> Tensor:
    return F.silu(x)


@_silu.register_fake
def _(x: Tensor) -> Tensor:
    return torch.empty_like(x)


_silu.register_autograd(
    lambda ctx, gradient: (gradient * ctx.saved_tensors[0].clamp(-0.1, 0.1),),
    setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs),
)


def test_an_operator_of_others_keeps_its_own_backward() -> None:
    def gradient(wrapped: bool) -> Tensor:
        model = Lambda(
            lambda module, x: torch.ops.gact_graph_test_derivatives.silu(x @ module.weight)
        )
        if wrapped:
            gact_graph.wrap(model, bits=2, adaptive=False, min_bytes=0)
        model(torch.randn(*SHAPE, generator=seeded(0))).square().sum().backward()
        assert model.weight.grad is not None
        return model.weight.grad

    assert torch.equal(gradient(wrapped=True), gradient(wrapped=False))
