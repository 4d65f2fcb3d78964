"""Saved tensors that backward computes again from tensors that are saved anyway."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable
from typing import Any, ClassVar

import pytest
import torch
import torch.nn.functional as F
from beside import amount
from samples import (  # noqa: F401
    FEATURES,
    Lambda,
    distance,
    equal,
    gradients,
    graph,
    make,
    one_thread,
    seeded,
    train_step,
)
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode
from torch_geometric.nn import (
    DeepGCNLayer,
    GATConv,
    GATv2Conv,
    GCNConv,
    GraphNorm,
    JumpingKnowledge,
    MessagePassing,
    PairNorm,
)

import gact_graph

X, EDGES = graph()
LOSSLESS = {"level": "lossless", "bits": 32, "adaptive": False, "min_bytes": 0}
TWO_BITS = {"bits": 2, "adaptive": False, "min_bytes": 0}


class Net(nn.Module):
    """A linear layer, a function of its result, and a second linear layer."""

    def __init__(self, *between: nn.Module | Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(FEATURES, 64), nn.Linear(64, 5)
        self.between = between
        self.parts = nn.ModuleList(part for part in between if isinstance(part, nn.Module))

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x).cumsum(0)  # no operation that is computed again
        for part in self.between:
            h = part(h)
        return self.second(h)


def codec_of_input(model: nn.Module) -> str:
    """The codec of the second layer's input; a tensor that takes nothing may have no row."""
    rows = {row.slot: row.codec for row in gact_graph.report(model).contexts}
    return rows.get("second/linear.input", "rebuild")


def dropout(h: Tensor) -> Tensor:
    return F.dropout(h, 0.5)


CHAINS = {
    "batch norm": (nn.BatchNorm1d(64), F.relu, dropout),
    "batch norm without weights": (nn.BatchNorm1d(64, affine=False), F.relu),
    "layer norm": (nn.LayerNorm(64), nn.ReLU(), dropout),
    "layer norm without a bias": (nn.LayerNorm(64, bias=False), F.leaky_relu),
    "leaky relu": (nn.BatchNorm1d(64), nn.LeakyReLU(0.3), dropout),
    "in place": (nn.BatchNorm1d(64), nn.ReLU(inplace=True), nn.Dropout(0.3)),
    "sums and factors": (nn.BatchNorm1d(64), lambda h: 3 * h - h.neg() / 4 + 1, F.relu),
    "views": (nn.BatchNorm1d(64), lambda h: h.view(-1, 4, 16).mul(2).view(-1, 64), F.relu),
    "a saved result": (torch.tanh, dropout),
}
CURVED = {
    "gelu": (nn.LayerNorm(64), F.gelu, dropout),
    "silu": (nn.BatchNorm1d(64), nn.SiLU()),
    "elu": (nn.BatchNorm1d(64), F.elu, dropout),
}


@pytest.mark.parametrize("name", CHAINS | CURVED)
def test_lossless_has_the_same_bits(name: str) -> None:
    stock = make(lambda: Net(*(CHAINS | CURVED)[name]))
    model = gact_graph.wrap(copy.deepcopy(stock), **LOSSLESS)
    for seed in range(2):
        assert equal(train_step(model, X, seed=seed), train_step(stock, X, seed=seed))
    assert codec_of_input(model) == "rebuild"


def squared_bias(model: nn.Module, draws: int) -> float:
    """The squared norm of the mean error of the second layer's gradient, without its variance."""

    def gradient(model: nn.Module) -> Tensor:
        torch.manual_seed(0)
        model.zero_grad()
        # A copy of the inputs has other noise at each draw, and not the next of a dither.
        (model(X.clone()) * torch.randn(len(X), 5, generator=seeded(8))).sum().backward()
        return model.second.weight.grad.double().flatten()

    return squared_bias_of(gradient, model, draws)


DRAWS = amount(500, 2000)


def squared_bias_of(gradient: Callable[[nn.Module], Tensor], model: nn.Module, draws: int) -> float:
    exact = gradient(gact_graph.unwrap(copy.deepcopy(model)))
    errors = torch.stack([gradient(model) - exact for _ in range(draws)])
    squares, square = errors.square().sum(), errors.sum(0).square().sum()
    assert squares > 0
    return float((square - squares) / (draws * (draws - 1)) / exact.square().sum())


@pytest.mark.parametrize("name", CHAINS)
def test_codes_are_unbiased(name: str) -> None:
    model = gact_graph.wrap(make(lambda: Net(*CHAINS[name])), **TWO_BITS)
    assert abs(squared_bias(model, 50)) < 1e-3
    assert codec_of_input(model) == "rebuild"
    gact_graph.unwrap(model)  # other tests have the same modules


@pytest.mark.long
@pytest.mark.parametrize("name", CHAINS)
def test_codes_are_unbiased_over_many_draws(name: str) -> None:
    model = gact_graph.wrap(make(lambda: Net(*CHAINS[name])), **TWO_BITS)
    assert abs(squared_bias(model, DRAWS)) < 0.06 / DRAWS
    gact_graph.unwrap(model)


@pytest.mark.parametrize("name", ["gelu", "silu", "elu"])
def test_curved_functions_of_codes_are_not_computed_again(name: str) -> None:
    model = gact_graph.wrap(make(lambda: Net(*CURVED[name])), **TWO_BITS)
    train_step(model, X)
    assert codec_of_input(model) == "quantize"


NODES, LINKS = graph(2000, 6000)
"""A graph with so many nodes that a product saves more memory than its weight takes."""


class Factored(nn.Module):
    """A product with a tensor that is computed from codes, and layers that read the product."""

    def __init__(self, product: nn.Module, *after: nn.Module) -> None:
        super().__init__()
        self.first, self.norm = nn.Linear(FEATURES, 64), nn.BatchNorm1d(64)
        self.product, self.last = product, nn.Linear(64, 5)
        self.after = nn.ModuleList(after)

    def forward(self, x: Tensor) -> Tensor:
        h = F.relu(self.norm(self.first(x).roll(1)))  # no operation that is computed again
        h = self.product(h, LINKS) if isinstance(self.product, MessagePassing) else self.product(h)
        for part in self.after:
            h = part(h)
        out: Tensor = self.last(h)
        return out


class InitialResidual(nn.Module):
    """GCNII's product."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(64, 64) / 8)

    def forward(self, h: Tensor) -> Tensor:
        return torch.addmm(h, h, self.weight, beta=0.5, alpha=0.5)


class TestProducts:
    """The noise of a product is not that of its factor, of which its weight's gradient is made."""

    READ: ClassVar = {
        "batch norm": (lambda: Factored(nn.Linear(64, 64), nn.BatchNorm1d(64), nn.ReLU()), False),
        "layer norm": (lambda: Factored(nn.Linear(64, 64), nn.LayerNorm(64), nn.ReLU()), False),
        "addmm": (lambda: Factored(InitialResidual(), nn.BatchNorm1d(64), nn.ReLU()), False),
        "messages": (lambda: Factored(GATConv(64, 16, 4)), False),
        "messages in blocks": (lambda: Factored(GATConv(64, 16, 4)), 600),
        "two products": (lambda: Factored(GATv2Conv(64, 16, 4)), False),
    }

    @staticmethod
    def whole(model: nn.Module) -> Tensor:
        torch.manual_seed(0)
        model.zero_grad()
        model(NODES.clone()).square().sum().backward()
        return torch.cat([p.grad.double().flatten() for p in model.parameters()])

    @classmethod
    def wrapped(cls, name: str) -> nn.Module:
        make_net, blocks = cls.READ[name]
        # Exponentials of noise have a bias of their own.
        pin = {"*softmax*": 32, "*alpha*": 32, "product/message/mul.input": 32}
        return gact_graph.wrap(make(make_net), blocks=blocks, pin=pin, **TWO_BITS)

    @pytest.mark.filterwarnings("ignore:Expected pin to match")
    @pytest.mark.parametrize("name", READ)
    def test_codes_are_unbiased(self, name: str) -> None:
        model = self.wrapped(name)
        assert abs(squared_bias_of(self.whole, model, 50)) < 3e-4
        slots = {r.slot for r in gact_graph.report(model).contexts if r.codec == "rebuild"}
        read = ("after.0/", "product/mul.input", "product/edge_update/mul.input.source")
        assert any(slot.startswith(read) for slot in slots)

    @pytest.mark.long
    @pytest.mark.filterwarnings("ignore:Expected pin to match")
    @pytest.mark.parametrize("name", READ)
    def test_codes_are_unbiased_over_many_draws(self, name: str) -> None:
        # Layer norm divides by the noise of each row: about 1 % at 2 bits, a hundredth at 4 bits.
        bound = 2e-4 if name == "layer norm" else 0.0
        found = abs(squared_bias_of(self.whole, self.wrapped(name), DRAWS))
        assert found < max(bound, 0.06 / DRAWS)

    @staticmethod
    def codecs(model: nn.Module, x: Tensor) -> dict[str, str]:
        gact_graph.wrap(model, **TWO_BITS)
        train_step(model, x)
        return {row.slot: row.codec for row in gact_graph.report(model).contexts}

    def test_a_product_of_a_product_is_stored(self) -> None:
        """Codes have two decodings, and three products of them would need three."""
        layers = [part for _ in range(3) for part in (nn.Linear(64, 64), nn.BatchNorm1d(64))]
        codecs = self.codecs(Factored(nn.Identity(), *layers), NODES)
        found = [codecs[f"after.{i}/batch_norm.input"] for i in (1, 3, 5)]
        assert found == ["rebuild", "quantize", "rebuild"]

    def test_a_product_that_takes_long_is_stored(self) -> None:
        for width, codec in (256, "rebuild"), (320, "quantize"):
            model = nn.Sequential(nn.Linear(width, 32), nn.BatchNorm1d(32))
            codecs = self.codecs(model, torch.randn(40_000, width))
            assert codecs["1/batch_norm.input"] == codec

    def test_a_product_that_is_smaller_than_its_weight_is_stored(self) -> None:
        for rows, codec in (2000, "rebuild"), (400, "quantize"):
            codecs = self.codecs(Factored(nn.Linear(64, 64), nn.BatchNorm1d(64)), NODES[:rows])
            assert codecs["after.0/batch_norm.input"] == codec

    def test_a_product_with_an_input_is_exact(self) -> None:
        stock = make(lambda: nn.Sequential(nn.Linear(FEATURES, 64), nn.GELU()))
        model = copy.deepcopy(stock)
        assert self.codecs(model, NODES)["1/gelu.input"] == "rebuild"
        assert equal(train_step(model, NODES), train_step(stock, NODES))


class Layers(nn.Module):
    """Networks of layers whose norms and sums PyG computes by scatters."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.encode, self.decode = nn.Linear(FEATURES, 64), nn.Linear(64, 5)
        convs = [GCNConv(64, 64) for _ in range(3)]
        if kind == "DeeperGCN":
            layers = [DeepGCNLayer(c, nn.LayerNorm(64), nn.ReLU(), dropout=0.2) for c in convs]
            self.layers = nn.ModuleList(layers)
        else:
            self.layers = nn.ModuleList(convs)
        self.norm = {"GraphNorm": GraphNorm(64), "PairNorm": PairNorm()}.get(kind)
        self.jump = JumpingKnowledge("cat") if kind == "JumpingKnowledge" else None
        if self.jump is not None:
            self.decode = nn.Linear(3 * 64, 5)

    def forward(self, x: Tensor, edges: Tensor) -> Tensor:
        h, states = self.encode(x), []
        for layer in self.layers:
            h = layer(h, edges)
            if self.norm is not None:
                h = F.dropout(F.relu(self.norm(h)), 0.4, self.training)
            states.append(h)
        return self.decode(h if self.jump is None else self.jump(states))


@pytest.mark.parametrize("kind", ["DeeperGCN", "GraphNorm", "PairNorm", "JumpingKnowledge"])
def test_networks_of_pyg(kind: str) -> None:
    stock = make(lambda: Layers(kind))
    before = {}
    for blocks in (False, 64):
        model = gact_graph.wrap(copy.deepcopy(stock), blocks=blocks, **LOSSLESS)
        mine, theirs = train_step(model, X, EDGES), train_step(stock, X, EDGES)
        assert equal(mine, theirs) if blocks is False else distance(mine, theirs) < 1e-6
        before[blocks] = gact_graph.report(model)
    assert "rebuild" in {row.codec for row in before[False].contexts}


def test_residual_networks_compute_a_few_layers_again_at_most() -> None:
    class Residual(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm = nn.LayerNorm(64)

        def forward(self, h: Tensor) -> Tensor:
            return F.relu(h + self.norm(h.cumsum(0)))

    for layers, codec in (2, "rebuild"), (9, "nonzero"):
        parts = [nn.LayerNorm(64), *(Residual() for _ in range(layers))]
        net = make(lambda parts=parts: Net(*parts))
        model = gact_graph.wrap(copy.deepcopy(net), **LOSSLESS)
        assert equal(train_step(model, X), train_step(net, X))
        rows = {row.slot: row.codec for row in gact_graph.report(model).contexts}
        assert rows.get("second/linear.input", "rebuild") == codec


class _Products(TorchDispatchMode):
    """Counts products of matrices."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func is torch.ops.aten.addmm.default
        return func(*args, **(kwargs or {}))


def test_a_product_with_several_readers_is_computed_once() -> None:
    class Scores(nn.Module):
        def __init__(self, readers: int) -> None:
            super().__init__()
            self.first, self.norm = nn.Linear(FEATURES, 64), nn.BatchNorm1d(64)
            self.second = nn.Linear(64, 64)
            self.scales = nn.ParameterList(torch.ones(64) for _ in range(readers))

        def forward(self, x: Tensor) -> Tensor:
            h = self.second(F.relu(self.norm(self.first(x).cumsum(0))))
            return sum(h * scale for scale in self.scales)

    counts = []
    for readers in 1, 3:
        model = gact_graph.wrap(make(lambda readers=readers: Scores(readers)), **TWO_BITS)
        out = model(X.repeat(50, 1))  # so many rows that codes would take more than the weight
        with _Products() as products:
            out.square().sum().backward()
        assert "rebuild" in {row.codec for row in gact_graph.report(model).contexts}
        counts.append(products.count)
    assert counts == [1, 1]


def test_an_optimizer_that_steps_between_forward_and_backward() -> None:
    """The gradient is that of the weights in forward, of which backward needs copies."""

    def run(model: nn.Module) -> list[Tensor]:
        torch.manual_seed(0)
        out = model(X)
        with torch.no_grad():
            model.parts[0].bias.mul_(3)  # stock saves no bias
        out.square().sum().backward()
        return [model.second.weight.grad]

    stock = make(lambda: Net(nn.BatchNorm1d(64), F.relu))
    model = gact_graph.wrap(copy.deepcopy(stock), **LOSSLESS)
    assert equal(run(model), run(stock))
    assert codec_of_input(model) == "rebuild"


def test_a_result_that_changed_in_place_is_another_tensor() -> None:
    def change(h: Tensor) -> Tensor:
        return F.dropout(h.add_(1), 0.5, training=False).relu_()

    stock = make(lambda: Net(nn.BatchNorm1d(64), change))
    model = gact_graph.wrap(copy.deepcopy(stock), **LOSSLESS)
    assert equal(train_step(model, X), train_step(stock, X))


def test_an_operand_that_has_changed_is_not_read_again() -> None:
    """No operation of the result's graph has saved it, so stock does not raise either."""

    def change(h: Tensor) -> Tensor:
        h = h * 1
        h @ torch.ones(64, 64)
        torch.mm(h, torch.ones(64, 64, requires_grad=True))  # saves h, and leads nowhere
        positive = h.relu()
        h.mul_(2)
        return positive * 3

    stock = make(lambda: Net(change))
    model = gact_graph.wrap(copy.deepcopy(stock), **LOSSLESS)
    assert equal(train_step(model, X), train_step(stock, X))


def test_an_input_that_forward_changes_is_still_memory_of_the_user() -> None:
    def forward(module: nn.Module, x: Tensor) -> Tensor:
        h = (x.detach() @ module.weight)[:, :FEATURES]
        return x.add_(h)[EDGES[0]] * h[EDGES[1]]

    x = X.clone()
    out = gact_graph.wrap(Lambda(forward), **LOSSLESS)(x)
    x.data.mul_(0.5)
    with pytest.raises(RuntimeError, match="has other values than in forward"):
        out.sum().backward()


def test_under_autocast_tensors_are_stored() -> None:
    def run(model: nn.Module) -> list[Tensor]:
        with torch.autocast("cpu", torch.bfloat16):
            return train_step(model, X)

    stock = make(lambda: Net(nn.BatchNorm1d(64), F.relu))
    model = gact_graph.wrap(copy.deepcopy(stock), **LOSSLESS)
    assert equal(run(model), run(stock))


class _FewBits(TorchFunctionMode):
    """Rounds the results of linear layers, with a gradient as if it did not."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func is not F.linear and func is not Tensor.index_select:
            return result
        return result + (_rounded(result.detach()) - result).detach()


class _FewBitsBelow(TorchDispatchMode):
    """Rounds the results of linear layers and gathers below autograd."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        aten = torch.ops.aten
        changed = func in (aten.addmm.default, aten.index_select.default)
        return _rounded(result) if changed else result


def _rounded(x: Tensor) -> Tensor:
    mantissa, exponent = torch.frexp(x)
    return torch.ldexp((mantissa * 8).round() / 8, exponent)


class TestModesOfOthers:
    """Backward computes nothing again that a mode of the user may have changed."""

    class Net(nn.Module):
        def __init__(self, mode: Callable[[], Any] = contextlib.nullcontext) -> None:
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(FEATURES, FEATURES) for _ in range(3))
            self.scale = nn.Parameter(torch.ones(FEATURES))
            self.mode = mode

        def forward(self, x: Tensor) -> Tensor:
            first, second, third = self.layers
            with self.mode():
                h = second(first(x))
                return third(h.index_select(0, torch.arange(len(h)).flip(0)) * self.scale)

    @pytest.mark.parametrize("mode", [_FewBits, _FewBitsBelow])
    @pytest.mark.parametrize("inside", [False, True], ids=["around forward", "inside forward"])
    @pytest.mark.parametrize("with_backward", [False, True])
    def test_gradients_are_those_of_stock(
        self, mode: Callable[[], Any], inside: bool, with_backward: bool
    ) -> None:
        def run(wrapped: bool) -> list[Tensor]:
            model = make(lambda: self.Net(mode) if inside else self.Net())
            if wrapped:
                gact_graph.wrap(model, **LOSSLESS)
            with contextlib.nullcontext() if inside else mode():
                loss = model(X.repeat(4, 1)).square().sum()
                if with_backward:
                    loss.backward()
            if not with_backward:
                loss.backward()
            return gradients(model)

        assert equal(run(wrapped=True), run(wrapped=False))

    @pytest.mark.parametrize(
        "mode", [lambda: torch.device("cpu"), lambda: FlopCounterMode(display=False)]
    )
    def test_those_of_torch_change_no_result(self, mode: Callable[[], Any]) -> None:
        model = gact_graph.wrap(make(lambda: Net(nn.BatchNorm1d(64), F.relu)), **LOSSLESS)
        with mode():
            train_step(model, X)
        assert codec_of_input(model) == "rebuild"


@torch.library.custom_op("gact_graph_test_rebuild::add", mutates_args=())
def _noisy(x: Tensor, scale: float) -> Tensor:
    return x + scale * torch.randn(x.shape)


_noisy.register_autograd(lambda ctx, gradient: (gradient, None))


def test_an_operator_of_others_runs_once_whatever_its_name() -> None:
    class Noisy(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return torch.ops.gact_graph_test_rebuild.add(x, 0.5)

    stock = nn.Sequential(nn.Linear(FEATURES, FEATURES), Noisy(), nn.Linear(FEATURES, 5))
    model = gact_graph.wrap(copy.deepcopy(stock), **LOSSLESS)
    gradients, following = [], []
    for net in stock, model:
        gradients.append(train_step(net, X.repeat(4, 1)))
        following.append(torch.rand(1))
    assert equal(*gradients) and equal([following[0]], [following[1]])


class TestJointMasks:
    @staticmethod
    def masks(*between: nn.Module | Callable[[Tensor], Tensor]) -> int:
        """Bits of masks an element, after a check that gradients have the same bits."""
        stock = make(lambda: Net(nn.BatchNorm1d(64), *between))
        model = gact_graph.wrap(copy.deepcopy(stock), **LOSSLESS)
        assert equal(train_step(model, X), train_step(stock, X))
        rows = [row for row in gact_graph.report(model).contexts if row.codec == "mask"]
        return sum(row.stored_bytes for row in rows) * 8 // (len(X) * 64)

    def test_relu_and_dropout_share_one(self) -> None:
        assert self.masks(lambda h: dropout(F.relu(h))) == 1
        assert self.masks(nn.Sequential(nn.ReLU(), nn.Dropout(0.3))) == 1

    def test_not_if_something_reads_between(self) -> None:
        def residual(h: Tensor) -> Tensor:
            h = F.relu(h)
            return h + dropout(h)

        assert self.masks(residual) == 2

    def test_not_if_something_may_read_later(self) -> None:
        between = []

        def keep(h: Tensor) -> Tensor:
            between.append(F.relu(h))
            return dropout(between[-1])

        assert self.masks(keep) == 2

    def test_not_if_a_hook_sees_the_gradient_between(self) -> None:
        def hooked(h: Tensor) -> Tensor:
            h = F.relu(h)
            h.register_hook(lambda gradient: gradient * 2)
            return dropout(h)

        assert self.masks(hooked) == 2

    def test_not_if_an_unseen_function_reads_between(self) -> None:
        class Twice(torch.autograd.Function):
            @staticmethod
            def forward(ctx, h):  # type: ignore[no-untyped-def]
                return h * 2

            @staticmethod
            def backward(ctx, gradient):  # type: ignore[no-untyped-def]
                return gradient * 2

        def unseen(h: Tensor) -> Tensor:
            h = F.relu(h)
            doubled = Twice.apply(h)
            return dropout(h) + doubled

        assert self.masks(unseen) == 2

    def test_at_few_bits_elements_between_are_those_that_pass(self) -> None:
        model = gact_graph.wrap(
            make(lambda: Net(nn.BatchNorm1d(64), lambda h: dropout(F.relu(h)))), **TWO_BITS
        )
        assert abs(squared_bias(model, 50)) < 1e-3
        assert gradients(model)


class TestOutsideOfForward:
    """Programs that an outsider wrote to find recipes that compute something else."""

    @staticmethod
    def beside(*between: Callable[[Tensor], Tensor] | nn.Module) -> nn.Module:
        stock = make(lambda: Net(*between))
        model = gact_graph.wrap(copy.deepcopy(stock), **LOSSLESS)
        assert equal(train_step(model, X), train_step(stock, X))
        return model

    @pytest.mark.parametrize("function", [torch.batch_norm, torch.ops.aten.batch_norm])
    def test_batch_norm_with_arguments_in_the_order_of_c(self, function: Any) -> None:
        weight, bias = torch.linspace(1, 2, 64), torch.linspace(-1, 0, 64)

        def norm(h: Tensor) -> Tensor:
            mean, variance = torch.zeros(64), torch.ones(64)
            return F.relu(function(h, weight, bias, mean, variance, True, 0.1, 1e-5, True))

        self.beside(norm)

    @pytest.mark.parametrize("norm", [nn.BatchNorm1d(64), nn.LayerNorm(64)], ids=["batch", "layer"])
    def test_norms_of_bfloat16_with_weights_of_float32(self, norm: nn.Module) -> None:
        weight = nn.Parameter(torch.randn(64, 64, dtype=torch.bfloat16, generator=seeded(1)))

        def half(h: Tensor) -> Tensor:
            return (norm(h.bfloat16()) @ weight).float()

        self.beside(half)
        model = gact_graph.wrap(make(lambda: Net(half)), **TWO_BITS)
        assert train_step(model, X)

    def test_a_quotient_that_is_rounded_is_no_function_of_noise(self) -> None:
        def rounded(h: Tensor) -> Tensor:
            return torch.div(h, 3.0, rounding_mode="floor") * 2

        between = nn.BatchNorm1d(64), rounded
        self.beside(*between)
        model = gact_graph.wrap(make(lambda: Net(*between)), **TWO_BITS)
        train_step(model, X)
        assert codec_of_input(model) == "quantize"

    @pytest.mark.parametrize("step", ["scaled", "residual", "product", "dropout"])
    def test_depth_costs_no_more_than_the_operations_of_one_recipe(self, step: str) -> None:
        """Each result was computed again from the last one, so 40 layers took 2^40 operations."""
        square = torch.randn(64, 64, generator=seeded(1)) / 30
        scale = torch.linspace(0.9, 1.1, 64, requires_grad=True).tanh
        steps = {
            "scaled": lambda h: h * scale(),
            "residual": lambda h: (h + F.layer_norm(h, (64,)).relu()) * scale(),
            "product": lambda h: h + F.layer_norm(h, (64,)).relu() @ square,
            "dropout": lambda h: h + dropout(F.layer_norm(h, (64,)).relu()),
        }
        count = 400 if step == "scaled" else 40
        model = self.beside(nn.LayerNorm(64), *[steps[step]] * count)
        assert "rebuild" in {row.codec for row in gact_graph.report(model).contexts}

    @pytest.mark.parametrize("alter", ["data", "numpy", "data before"])
    def test_a_result_that_changes_without_a_new_version(self, alter: str) -> None:
        def change(h: Tensor) -> Tensor:
            if alter == "data before":
                memory = h.data
                h = h.relu_()
                memory.mul_(2)
                return h
            h = h * 2
            if alter == "data":
                h.data.mul_(2)
            else:
                h.detach().numpy()[:] = 1
            return h

        self.beside(nn.BatchNorm1d(64), change)

    def test_backward_inside_autocast(self) -> None:
        """Stock read the product of forward, in float32."""

        def run(model: nn.Module) -> list[Tensor]:
            loss = model(NODES).square().sum()
            with torch.autocast("cpu", torch.bfloat16):
                loss.backward()
            return gradients(model)

        stock = make(lambda: nn.Sequential(nn.Linear(FEATURES, 64), nn.GELU(), nn.Linear(64, 5)))
        model = gact_graph.wrap(copy.deepcopy(stock), **LOSSLESS)
        assert equal(run(model), run(stock))
        codecs = {row.slot: row.codec for row in gact_graph.report(model).contexts}
        assert codecs["1/gelu.input"] == "rebuild"

    def test_a_source_that_changes_without_a_new_version(self) -> None:
        places = torch.arange(2 * len(X)) % len(X)

        def change(h: Tensor) -> Tensor:
            rows = h[places]
            h.data.mul_(2)
            return rows.view(2, -1, 64)[1]

        self.beside(change)

    @pytest.mark.parametrize(
        "view", [lambda c: c[:1].expand(300, 64), lambda c: c.t().contiguous().t()]
    )
    def test_views_of_memory_that_may_change(self, view: Callable[[Tensor], Tensor]) -> None:
        """The user may hold results without a graph, so some elements are compared."""
        constant = torch.randn(300, 64, generator=seeded(1))

        def between(h: Tensor) -> Tensor:
            return view(constant * 2) * h * 2

        self.beside(nn.BatchNorm1d(64), between)

    def test_joint_zeros_of_infinite_elements(self) -> None:
        """Zero times infinity is not zero, but ReLU and dropout make zero of minus infinity."""
        factor = nn.Parameter(torch.randn(len(X), 64, generator=seeded(1)))

        def between(h: Tensor) -> Tensor:
            h = h.index_fill(0, torch.arange(3), -torch.inf)
            between.read = h * factor  # type: ignore[attr-defined]
            return nn.Sequential(nn.ReLU(), nn.Dropout(0.5))(h)

        model = gact_graph.wrap(make(lambda: Net(between)), **TWO_BITS)
        assert all(gradient.isfinite().all() for gradient in train_step(model, X))
        assert codec_of_input(model) == "rebuild"

    @pytest.mark.parametrize("function", [F.silu, F.mish])
    def test_a_copied_operand_has_its_strides(self, function: Callable[[Tensor], Tensor]) -> None:
        """Vectorized kernels and those for other strides differ in the last bits."""
        weight = nn.Parameter(torch.randn(1, 2 * 64, generator=seeded(1)))

        def forward(module: nn.Module, x: Tensor) -> Tensor:
            small = (weight * 2)[:, ::2]
            return (function(small.expand(len(x), 64)) * module.weight[:1]).sin() * x[:, :1]

        def run(model: nn.Module) -> list[Tensor]:
            weight.grad = None
            model(X).sum().backward()
            return [weight.grad, model.weight.grad]

        assert equal(run(gact_graph.wrap(Lambda(forward), **LOSSLESS)), run(Lambda(forward)))

    def test_a_copied_operand_has_its_alignment(self) -> None:
        """Matrix products add in an order that depends on addresses."""
        for offset in range(1, 8):
            memory = torch.randn(offset + 300 * 6, generator=seeded(offset))
            table = nn.Parameter(memory[offset:].view(300, 6))

            def forward(module: nn.Module, table: Tensor = table) -> Tensor:
                return F.linear(table, module.weight[:7, :6]).sin()

            def run(model: nn.Module, table: nn.Parameter = table) -> list[Tensor]:
                table.grad = None
                model().square().sum().backward()
                assert table.grad is not None
                return [table.grad, *gradients(model)]

            model = gact_graph.wrap(Lambda(forward), **LOSSLESS)
            assert equal(run(model), run(Lambda(forward)))
            assert "rebuild" in {row.codec for row in gact_graph.report(model).contexts}


class _Forces(nn.Module):
    """The energy of edges by an MLP, and its gradient by the positions."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(3, 64), nn.Linear(64, 64)

    def forward(self, pos: Tensor) -> Tensor:
        pos = pos.detach().requires_grad_()
        hidden = self.last(F.softplus(self.first(pos)))
        [forces] = torch.autograd.grad(hidden.tanh().sum(), pos, create_graph=True)
        return forces


@pytest.mark.parametrize("options", [{"level": "lossless", "bits": 32}, {"bits": 4}])
def test_products_are_not_computed_again_for_two_backwards(
    options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """One backward inside forward keeps a graph, and the other runs through it."""
    # Under the mode that counts.
    monkeypatch.setattr("gact_graph.capture.recipes.has_other_modes", lambda: False)
    stock = make(_Forces)
    wrapped = gact_graph.wrap(copy.deepcopy(stock), adaptive=False, min_bytes=0, **options)
    pos, counts = torch.randn(2000, 3, generator=seeded(0)), []
    for model in (stock, wrapped):
        for _ in range(3):  # the first finds the tensors that are read twice
            with _Products() as products:
                model(pos).square().sum().backward()
        counts.append(products.count)
    assert counts[0] == counts[1] > 0
