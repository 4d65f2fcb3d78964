"""Programs that an attack on capture found: another gradient than in PyTorch, or an error."""

from __future__ import annotations

import copy
import ctypes
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
import torch.nn.functional as F
from fresh import run
from samples import Lambda, seeded
from torch import Tensor, nn
from torch_geometric.nn import MessagePassing

import gact_graph
from gact_graph.codecs.quantize import exceeds_float32

ROWS = 1200


def _cleared(tensor: Tensor) -> Tensor:
    ctypes.memset(tensor.data_ptr(), 0, tensor.nbytes)
    return tensor


def _doubled(module: nn.Module, x: Tensor) -> Tensor:
    h = module.first(x)
    few = h.masked_select(x > 1)  # saves h for its shape
    h.data.mul_(2)
    out: Tensor = few.sum() + module.second(h).square().sum()
    return out


class Stop(torch.autograd.Function):
    """A function without a gradient."""

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        return None


def net(forward: Callable[[nn.Module, Tensor], Tensor]) -> nn.Module:
    torch.manual_seed(0)
    model = Lambda(forward)
    model.first, model.second = nn.Linear(64, 64), nn.Linear(64, 64)
    model.norm = nn.BatchNorm1d(64)
    model.weight = nn.Parameter(torch.rand(64, generator=seeded(1)))
    return model


def gradients(model: nn.Module, x: Tensor) -> list[Tensor | None]:
    for _ in range(2):
        model.zero_grad()
        torch.manual_seed(1)
        model(x).sum().backward()
    return [p.grad for p in model.parameters()]


X = torch.randn(ROWS, 64, generator=seeded(2))

PROGRAMS: dict[str, tuple[Callable[[nn.Module, Tensor], Tensor], Tensor]] = {
    "a product of three dimensions, transposed": (
        lambda m, x: F.softplus(m.first(x.transpose(1, 2))) * m.weight,
        torch.randn(1000, 64, 3, generator=seeded(3)),
    ),
    "a dropout whose gradient is transposed": (
        lambda m, x: F.dropout(m.first(x), 0.3).t().contiguous() * torch.ones(ROWS).exp(),
        X,
    ),
    "a vector before a batch of matrices": (
        lambda m, x: m.second(m.weight @ x),
        torch.randn(500, 64, 64, generator=seeded(4)),
    ),
    "a matrix before a batch of matrices": (
        lambda m, x: (m.first.weight[:4] @ x).square(),
        torch.randn(1000, 64, 6, generator=seeded(5)),
    ),
    "a key of a tensor and an array": (
        lambda m, x: m.first(x).log_softmax(1)[torch.arange(ROWS), numpy.arange(ROWS) % 5],
        X,
    ),
    "memory that is handed out between two readers": (_doubled, X),
    "a number of a large tensor": (
        lambda m, x: torch.scatter_reduce(
            m.first(x)[0, 0], 0, torch.zeros((), dtype=torch.long), m.weight[0], "sum"
        ),
        X,
    ),
    "memory that is written by its address": (lambda m, x: _cleared(x * m.weight).sin(), X),
    "vmap inside of forward": (
        lambda m, x: torch.func.vmap(lambda row: m.first(row).relu())(m.second(x)) * m.weight,
        X,
    ),
    "nested tensors": (
        lambda m, x: (
            F.linear(
                torch.nested.nested_tensor([x[:200], x[200:]]), m.first.weight, m.first.bias
            ).to_padded_tensor(0.0)
            * m.weight
        ),
        X,
    ),
}


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("name", PROGRAMS)
def test_lossless_has_the_bits_of_stock(name: str) -> None:
    forward, x = PROGRAMS[name]
    model = gact_graph.wrap(net(forward), level="lossless", min_bytes=0)
    for own, expected in zip(gradients(model, x), gradients(net(forward), x), strict=True):
        assert (own is None) == (expected is None)
        assert own is None or torch.equal(own, expected)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_nested_tensors_are_not_measured() -> None:
    forward, x = PROGRAMS["nested tensors"]
    model = gact_graph.wrap(net(forward), bits=16, min_bytes=0)
    with pytest.warns(RuntimeWarning, match="because forward makes nested tensors"):
        got = gradients(model, x)
    for own, expected in zip(got, gradients(net(forward), x), strict=True):
        assert (own is None) == (expected is None)
        assert own is None or (own - expected).norm() <= 1e-3 * expected.norm()


@pytest.mark.parametrize("operation", ["norm", "scaled"])
def test_a_gradient_in_the_memory_of_a_tensor_has_no_graph(operation: str) -> None:
    found: list[Tensor] = []

    def forward(module: nn.Module, x: Tensor) -> Tensor:
        h = module.first(x).roll(1, 0)
        h.register_hook(found.append)
        out: Tensor = module.norm(h) if operation == "norm" else h * module.weight
        return out.square()

    model = gact_graph.wrap(net(forward), bits=16, adaptive=False, min_bytes=0)
    gradients(model, X)
    assert len(found) == 2 and not any(gradient.requires_grad for gradient in found)


CLOSED: dict[str, tuple[str, Callable[[Tensor], Tensor]]] = {
    "relu and dropout": ("lossless", lambda h: F.dropout(h.relu(), 0.5)),
    "softshrink": ("L1", lambda h: F.softshrink(h.roll(1, 0))),
    "hardshrink": ("L1", lambda h: F.hardshrink(h.roll(1, 0))),
}


@pytest.mark.parametrize("name", CLOSED)
def test_a_closed_activation_stops_nan(name: str) -> None:
    """The gradient of the norm of a row of zeros."""
    level, function = CLOSED[name]

    def forward(module: nn.Module, x: Tensor) -> Tensor:
        return function(F.linear(x, module.first.weight)).square().sum(1).sqrt()

    x = X.clone()
    x[0] = 0
    stock, model = (net(forward) for _ in range(2))
    gact_graph.wrap(model, level=level, adaptive=False, min_bytes=0)
    got, expected = gradients(model, x)[1], gradients(stock, x)[1]
    assert got is not None and got.isfinite().all()
    assert expected is not None and expected.isfinite().all()


def test_a_tensor_whose_graph_a_backward_has_freed() -> None:
    model = gact_graph.wrap(net(lambda m, x: x), level="lossless", min_bytes=0)
    with gact_graph.compress(model):
        h = model.first(X).relu()
        model.second(h).sum().backward()
        expected = model.first(X).relu().square().mean()
        assert torch.equal((h * h).mean(), expected)


def test_an_expanded_input_of_a_norm() -> None:
    def forward(module: nn.Module, x: Tensor) -> Tensor:
        h = module.first(x).flip(0)
        out = module.norm(h.unsqueeze(-1).expand(-1, -1, 8))
        return F.linear(out, module.first.weight[:4, :8]).square()

    model = gact_graph.wrap(net(forward), bits=16, adaptive=False, min_bytes=0)
    for own, expected in zip(gradients(model, X), gradients(net(forward), X), strict=True):
        assert own is None or (own - expected).norm() <= 0.05 * expected.norm() + 0.05


OPERATIONS: dict[str, Callable[[nn.Module, Tensor], Tensor]] = {
    "relu": lambda m, x: m.first(x).relu(),
    "dropout": lambda m, x: F.dropout(m.first(x), 0.5),
    "scaled": lambda m, x: m.first(x) * m.weight.exp(),
    "linear": lambda m, x: m.first(x.sin()),
    "addmm": lambda m, x: torch.addmm(m.first(x), x.sin(), m.first.weight.t()),
    "batch norm": lambda m, x: m.norm(m.first(x)),
}


@pytest.mark.parametrize("level", ["lossless", "L1"])
@pytest.mark.parametrize("name", OPERATIONS)
def test_a_parameter_without_a_gradient_gets_none(name: str, level: str) -> None:
    def forward(module: nn.Module, x: Tensor) -> Tensor:
        return module.second(x).sum() + Stop.apply(OPERATIONS[name](module, x)).sum()

    x = torch.randn(ROWS, 64, generator=seeded(2))
    stock, model = net(forward), gact_graph.wrap(net(forward), level=level, min_bytes=0)
    got, expected = gradients(model, x), gradients(stock, x)
    assert [g is None for g in got] == [g is None for g in expected]
    assert any(g is None for g in got) and any(g is not None for g in got)


@pytest.mark.parametrize("norm", [nn.BatchNorm1d, nn.LayerNorm])
def test_float64_far_from_zero_keeps_its_deviations(norm: type[nn.Module]) -> None:
    """Codes are made in float32, which rounds a deviation of 1 from 1e8 to 8 or 0."""

    def forward(model: nn.Module, x: Tensor) -> Tensor:
        return model.norm(model.first(x).flip(0) + 1e8)

    model, x = net(forward).double(), X.double()
    model.norm = norm(64).double()
    ours = gact_graph.wrap(copy.deepcopy(model), bits=16, adaptive=False, min_bytes=0)
    weights = torch.randn(ROWS, 64, generator=seeded(4), dtype=torch.float64)
    for each in (model, ours):
        (each(x) * weights).sum().backward()
    torch.testing.assert_close(ours.norm.weight.grad, model.norm.weight.grad, rtol=1e-3, atol=0.1)


def test_float64_without_its_zeros() -> None:
    """The slices of a norm are those of all elements, and the codes those of the others."""

    def forward(model: nn.Module, x: Tensor) -> Tensor:
        h = model.first(x).relu() * 1e8
        return model.norm(h.relu()) + h.relu().square()

    model, x = net(forward).double(), X.double()
    model.norm = nn.LayerNorm(64).double()
    with torch.no_grad():
        model.first.bias[0] = 1e6
    ours = gact_graph.wrap(copy.deepcopy(model), bits=16, adaptive=False, min_bytes=0)
    for each in (model, ours):
        each(x).sum().backward()
    expected = model.first.weight.grad
    assert (ours.first.weight.grad - expected).norm() < 1e-2 * expected.norm()


def test_slices_of_elements_that_were_left_out() -> None:
    x = torch.rand(7, dtype=torch.float64) + 1e9
    assert exceeds_float32(x, ((4, 5), (1,))) and not exceeds_float32(x - 1e9, ((4, 5), (1,)))


# Code that no function mode sees reads what a layer returns.

UNSEEN = """
import sys, torch, gact_graph
from torch import nn
from torch_geometric.nn import GCNConv, GINConv, SAGEConv, SGConv

@torch.jit.script
def swish(h):
    return h * torch.sigmoid(h)

LAYERS = {
    "GIN": lambda: GINConv(nn.Linear(64, 64, bias=False)),
    "GIN of two": lambda: GINConv(nn.Sequential(nn.Linear(64, 64, bias=False), swish_module)),
    "SAGE": lambda: SAGEConv(64, 64, bias=False, root_weight=False),
    "SG": lambda: SGConv(64, 64, bias=False),
    "GCN": lambda: GCNConv(64, 64),
}
READERS = {
    "script": swish,
    "vmap": torch.func.vmap(lambda row: row * row.sigmoid()),
    "jvp": lambda h: torch.func.jvp(torch.tanh, (h,), (h,))[0],
    "trace": torch.jit.trace(lambda h: h * h.sigmoid(), torch.randn(8, 64)),
}

class Swish(nn.Module):
    def forward(self, h):
        return h * h.sigmoid()

swish_module = torch.jit.script(Swish())

class Net(nn.Module):
    def __init__(self, layer, reader):
        super().__init__()
        torch.manual_seed(0)
        self.conv, self.reader = LAYERS[layer](), reader
        if reader == "hook":
            self.conv.lin.register_forward_hook(lambda module, args, out: swish(out))
        if reader == "backward hook":
            self.conv.lin.register_full_backward_hook(lambda *args: None)

    def forward(self, x, edge_index):
        h = self.conv(x, edge_index)
        return READERS[self.reader](h) if self.reader in READERS else h

torch.manual_seed(1)
data = torch.randn(1000, 64), torch.randint(1000, (2, 5000))
pairs = [("GIN", reader) for reader in READERS]
pairs += [(layer, "script") for layer in ("GIN of two", "SAGE", "SG")]
pairs += [("GCN", reader) for reader in ("script", "hook", "backward hook")]
for layer, reader in pairs:
    print(layer, reader, file=sys.stderr)
    exact = Net(layer, reader)(*data)
    for options in ({}, {"level": "lossless", "blocks": "auto"}):
        model = gact_graph.wrap(Net(layer, reader), min_bytes=0, **options)
        for _ in range(3):
            out = model(*data)
            torch.testing.assert_close(out, exact, rtol=1e-4, atol=1e-5)
            out.sum().backward()
"""


def test_code_outside_of_function_modes_reads_results_of_layers(tmp_path: Path) -> None:
    """In a process of its own, which ends if it reads a tensor without memory."""
    script = tmp_path / "script.py"  # a scripted function needs a file
    script.write_text(UNSEEN)
    run("import runpy, sys; runpy.run_path(sys.argv[1])", str(script))


@torch.jit.script
def mean_of(h: Tensor) -> Tensor:
    return h.abs().mean()


class AddsBias(MessagePassing):
    """Adds a large bias to the sums of neighbors, which scripted code reads from the third call."""

    def __init__(self, by_function: bool) -> None:
        super().__init__()
        self.lin = nn.Linear(64, 64)
        self.bias = nn.Parameter(torch.full((64,), 100.0))
        self.by_function, self.calls = by_function, 0

    def forward(self, x: Tensor, edge_index: Tensor) -> tuple[Tensor, Tensor | None]:
        self.calls += 1
        x = self.lin(x)
        if self.by_function:
            out = gact_graph.message_passing(lambda x_i, x_j, e: x_j, x, edge_index)
        else:
            out = self.propagate(edge_index, x=x)
        if self.calls > 2:
            total = out + self.bias
            return total, mean_of(out)
        out = out + self.bias
        return out, None

    def message(self, x_j: Tensor) -> Tensor:
        return x_j


@pytest.mark.parametrize("by_function", [True, False])
@pytest.mark.parametrize("options", [{}, {"level": "lossless", "blocks": "auto"}])
def test_a_sum_of_neighbors_that_scripted_code_reads(
    by_function: bool, options: dict[str, str]
) -> None:
    x, edges = torch.randn(2000, 64, generator=seeded(1)), torch.arange(9000).remainder(2000)
    edge_index = torch.stack([edges, edges.flip(0)])
    seen = []
    for is_wrapped in (False, True):
        torch.manual_seed(1)
        model = Lambda(lambda m, x, edge_index: m.conv(x, edge_index))
        model.conv = AddsBias(by_function)
        if is_wrapped:
            gact_graph.wrap(model, min_bytes=0, **options)
        for _ in range(3):
            total, mean = model(x, edge_index)
            total.sum().backward()
        seen.append(mean)
    torch.testing.assert_close(seen[1], seen[0])


def test_float16_decodes_no_finite_number_to_infinity() -> None:
    def forward(module: nn.Module, x: Tensor) -> Tensor:
        return F.layer_norm((x * module.weight).clone(), (64,)).float() * X

    model = net(forward).half()
    model.weight = nn.Parameter(torch.ones(64, dtype=torch.float16))
    x = ((torch.rand(ROWS, 64, generator=seeded(6)) * 2 - 1) * 63000).half()
    gact_graph.wrap(model, bits=2, adaptive=False, min_bytes=0)
    gradients(model, x)
    assert model.weight.grad is not None and model.weight.grad.isfinite().all()


def test_float64_below_the_range_of_float32() -> None:
    def forward(module: nn.Module, x: Tensor) -> Tensor:
        return F.linear(F.linear(x, module.first.weight).roll(1, 0), module.second.weight) * 1e60

    model, x = net(forward).double(), X.double() * 1e-60
    stock = copy.deepcopy(model)
    gact_graph.wrap(model, bits=8, adaptive=False, min_bytes=0)
    own, expected = gradients(model, x)[3], gradients(stock, x)[3]
    assert own is not None and expected is not None
    assert (own - expected).norm() < 0.1 * expected.norm()


@pytest.mark.parametrize("level", ["lossless", "L1"])
def test_sizes_of_a_batch_norm_are_checked(level: str) -> None:
    held = torch.zeros(64)

    def forward(module: nn.Module, x: Tensor) -> Tensor:
        return F.batch_norm(module.first(x).roll(1, 0), held[:32], held[:32], training=True)

    model = gact_graph.wrap(net(forward), level=level, blocks="auto", min_bytes=0)
    with pytest.raises(RuntimeError, match="should contain 64 elements"):
        model(X)
    assert not held.any()


def test_the_caller_may_change_a_result_from_which_forward_gathers() -> None:
    ends = torch.randint(ROWS, (2, 4000), generator=seeded(7))

    def step(model: nn.Module) -> Tensor | None:
        model.zero_grad()
        z, score = model(X)
        z.detach().numpy()[:] = 0
        score.sigmoid().sum().backward()
        return model.first.weight.grad

    def forward(module: nn.Module, x: Tensor) -> Any:
        z = module.first(x).roll(1, 0)
        return z, (z[ends[0]] * z[ends[1]]).sum(-1)

    expected = step(net(forward))
    own = step(gact_graph.wrap(net(forward), bits=16, adaptive=False, min_bytes=0))
    assert own is not None and expected is not None
    assert (own - expected).norm() < 1e-2 * expected.norm()


def test_a_constant_that_is_handed_out_after_it_was_saved() -> None:
    def forward(module: nn.Module, x: Tensor) -> Tensor:
        h, kept = module.first(x), (x > 0).float()
        total = h * kept  # saves a bit for each element
        kept.data.mul_(3)
        out: Tensor = total.sum() + module.second(h + kept).square().sum()
        return out

    stock, model = net(forward), gact_graph.wrap(net(forward), level="lossless", min_bytes=0)
    for each in (stock, model):
        gradients(each, X)
    assert torch.equal(model.second.weight.grad, stock.second.weight.grad)
