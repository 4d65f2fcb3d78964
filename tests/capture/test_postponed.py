"""Layers whose product is summed before it is computed, and whose bias takes the sum's memory."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from samples import seeded
from torch import Tensor, nn
from torch_geometric.nn import GATConv, GATv2Conv, GCNConv, MessagePassing
from torch_geometric.utils import scatter

import gact_graph
from gact_graph.support.current import Product

NODES, EDGES, WIDTH = 3000, 20000, 16
STEPS = 4


class Conv(MessagePassing):
    """Multiplies by a weight, sums over neighbors, and adds a bias: as ``body`` has it."""

    def __init__(self, body: Callable[[Conv, Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.lin = nn.Linear(WIDTH, WIDTH, bias=False)
        self.bias = nn.Parameter(torch.randn(WIDTH))
        self.body, self.calls, self.kept = body, 0, list[Tensor]()

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        self.calls += 1
        self.kept.clear()
        return self.body(self, x, edge_index)

    def sum(self, x: Tensor, edge_index: Tensor) -> Tensor:
        return self.propagate(edge_index, x=x)

    def message(self, x_j: Tensor) -> Tensor:
        return x_j


def plain(conv: Conv, x: Tensor, edges: Tensor) -> Tensor:
    return conv.sum(conv.lin(x), edges) + conv.bias


def with_variables(conv: Conv, x: Tensor, edges: Tensor) -> Tensor:
    x = conv.lin(x)
    out = conv.sum(x, edges)
    out = out + conv.bias
    return out


def product_after_sum(conv: Conv, x: Tensor, edges: Tensor) -> Tensor:
    y = conv.lin(x)
    return conv.sum(y, edges) + y


def product_before_sum(conv: Conv, x: Tensor, edges: Tensor) -> Tensor:
    y = conv.lin(x)
    return conv.sum(y, edges) * y.mean()


def product_for_later(conv: Conv, x: Tensor, edges: Tensor) -> Tensor:
    y = conv.lin(x)
    conv.kept.append(y)
    return conv.sum(y, edges) + conv.bias


def transposed_product(conv: Conv, x: Tensor, edges: Tensor) -> Tensor:
    y = conv.lin(x)
    turned = y.T
    return conv.sum(y, edges) + turned.T


def product_in_numpy(conv: Conv, x: Tensor, edges: Tensor) -> Tensor:
    y = conv.lin(x)
    factor = float(y.detach().numpy().max())
    return conv.sum(y, edges) * factor


def address_of_product(conv: Conv, x: Tensor, edges: Tensor) -> Tensor:
    y = conv.lin(x)
    assert y.data_ptr() and y.untyped_storage().nbytes() == y.nbytes
    return conv.sum(y, edges) + conv.bias


def input_changed_after_product(conv: Conv, x: Tensor, edges: Tensor) -> Tensor:
    copied = x * 1
    y = F.linear(copied, conv.lin.weight.detach())
    copied.mul_(3)
    return conv.sum(y, edges) + copied


def sum_twice(conv: Conv, x: Tensor, edges: Tensor) -> Tensor:
    y = conv.lin(x)
    return conv.sum(y, edges) + conv.sum(y, edges)


def sum_after_bias(conv: Conv, x: Tensor, edges: Tensor) -> Tensor:
    out = conv.sum(conv.lin(x), edges)
    return (out + conv.bias) * out


def view_after_bias(conv: Conv, x: Tensor, edges: Tensor) -> Tensor:
    out = conv.sum(conv.lin(x), edges)
    turned = out.t()
    return (out + conv.bias) * turned.t()


def two_views(conv: Conv, x: Tensor, edges: Tensor) -> Tensor:
    out = conv.sum(conv.lin(x), edges)
    out = out.view(-1, 4, WIDTH // 4)
    out = out.view(-1, WIDTH)
    return out + conv.bias


def sum_doubled(conv: Conv, x: Tensor, edges: Tensor) -> Tensor:
    out = conv.sum(conv.lin(x), edges)
    return out + out


def sum_needed_in_later_calls(conv: Conv, x: Tensor, edges: Tensor) -> Tensor:
    """As ``with_variables`` in the calls from which the library learns."""
    out = conv.sum(conv.lin(x), edges)
    before = out if conv.calls > 2 else None
    out = out + conv.bias
    return out if before is None else out * before


def sum_for_later(conv: Conv, x: Tensor, edges: Tensor) -> Tensor:
    out = conv.sum(conv.lin(x), edges)
    if conv.calls > 2:
        conv.kept.append(out)
    return out + conv.bias


BODIES = {
    body.__name__: body
    for body in (
        *(plain, with_variables, product_after_sum, product_before_sum, product_for_later),
        *(transposed_product, product_in_numpy, address_of_product, input_changed_after_product),
        *(sum_twice, sum_after_bias, view_after_bias, two_views, sum_doubled),
        *(sum_needed_in_later_calls, sum_for_later),
    )
}


class Net(nn.Module):
    def __init__(self, conv: nn.Module, width: int = WIDTH) -> None:
        super().__init__()
        self.first, self.conv, self.last = nn.Linear(8, WIDTH), conv, nn.Linear(width, 3)

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        x = self.conv(self.first(x).relu(), edge_index)
        total = self.last(x.tanh())
        # What a layer has kept is read after its forward.
        return total + sum(kept.sum() for kept in getattr(self.conv, "kept", ()))


@pytest.fixture
def data() -> tuple[Tensor, Tensor]:
    generator = seeded(1)
    edges = torch.randint(NODES, (2, EDGES), generator=generator)
    return torch.randn(NODES, 8, generator=generator), edges


@pytest.fixture
def as_in_pyg(monkeypatch: pytest.MonkeyPatch) -> None:
    """Count the layers of this file as layers of PyG."""
    monkeypatch.setattr("gact_graph.capture.postponed._LAYERS", __name__)


@pytest.fixture
def written(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Grows with the number of rows of each product that is computed late or in parts."""
    rows, write = list[int](), Product.write

    def counted(product: Product, result: Tensor) -> None:
        rows.append(len(result))
        write(product, result)

    monkeypatch.setattr(Product, "write", counted)
    return rows


def _compare(stock: nn.Module, *data: Tensor, **options: Any) -> nn.Module:
    """Train a model beside a wrapped copy, whose results must be the same but for the order."""
    wrapped = gact_graph.wrap(copy.deepcopy(stock), min_bytes=0, blocks=4096, **options)
    for _ in range(STEPS):
        outs = []
        for model in (stock, wrapped):
            model.zero_grad()
            out = model(*data)
            out.square().mean().backward()
            outs.append(out.detach())
        torch.testing.assert_close(outs[1], outs[0], rtol=1e-4, atol=1e-5)
        for own, other in zip(wrapped.parameters(), stock.parameters(), strict=True):
            torch.testing.assert_close(own.grad, other.grad, rtol=1e-3, atol=1e-5)
    return wrapped


@pytest.mark.usefixtures("as_in_pyg")
@pytest.mark.parametrize("name", BODIES)
def test_any_layer_computes_what_it_computes_in_stock(
    name: str, data: tuple[Tensor, Tensor], written: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gact_graph.layers.blocks.weighted_sum._SUMMED_BYTES", 1000 * WIDTH * 4)
    _compare(Net(Conv(BODIES[name])), *data, level="lossless")
    if BODIES[name] in (plain, with_variables):
        assert written == 3 * STEPS * [1000]


@pytest.mark.parametrize(
    "make", [GCNConv, lambda *w: GATConv(*w, heads=2), lambda *w: GATv2Conv(*w, heads=2)]
)
@pytest.mark.parametrize("options", [{"level": "lossless"}, {"bits": 16, "adaptive": False}])
def test_layers_of_pyg(
    make: Any, options: dict[str, Any], data: tuple[Tensor, Tensor], written: list[int]
) -> None:
    conv = make(WIDTH, WIDTH)
    if options.get("level") == "lossless":
        _compare(Net(conv, conv(torch.zeros(9, WIDTH), data[1] % 9).size(1)), *data, **options)
    else:
        model = gact_graph.wrap(
            Net(conv, conv(torch.zeros(9, WIDTH), data[1] % 9).size(1)), min_bytes=0, **options
        )
        model(*data).sum().backward()
    if make is GCNConv:
        assert written and max(written) <= NODES


def test_a_layer_of_the_user_is_not_trusted(
    data: tuple[Tensor, Tensor], written: list[int]
) -> None:
    """Its code could read memory without an operation of PyTorch."""
    _compare(Net(Conv(plain)), *data, level="lossless")
    assert not written


def test_plain_lossless_postpones_nothing(data: tuple[Tensor, Tensor], written: list[int]) -> None:
    model = gact_graph.wrap(Net(GCNConv(WIDTH, WIDTH)), level="lossless", min_bytes=0)
    model(*data).sum().backward()
    assert not written


def test_all_calls_round_alike(data: tuple[Tensor, Tensor]) -> None:
    model = gact_graph.wrap(Net(GCNConv(WIDTH, WIDTH)), level="lossless", blocks=4096, min_bytes=0)
    first, *others = [model(*data).detach() for _ in range(3)]
    assert all(torch.equal(first, other) for other in others)


def test_edge_work_that_runs_as_stock_gets_the_product(
    data: tuple[Tensor, Tensor], written: list[int]
) -> None:
    """In one call it does not run in blocks, and in the next it does."""
    conv = GCNConv(WIDTH, WIDTH)
    model = gact_graph.wrap(Net(conv), level="lossless", blocks=4096, min_bytes=0)
    x, edges = data
    empty = edges[:, :0]
    conv.add_self_loops = False
    for chosen in (empty, edges):
        written.clear()
        out = model(x, chosen)
        h = conv.lin(model.first(x).relu())
        weight = torch.ones(chosen.size(1))
        degree = scatter(weight, chosen[1], dim_size=NODES, reduce="sum").pow(-0.5)
        degree[degree.isinf()] = 0
        weight = (degree[chosen[0]] * degree[chosen[1]])[:, None]
        total = scatter(h[chosen[0]] * weight, chosen[1], dim_size=NODES, reduce="sum")
        expected = model.last((total + conv.bias).tanh())
        torch.testing.assert_close(out, expected, rtol=1e-4, atol=1e-5)
        assert written


@pytest.mark.usefixtures("as_in_pyg")
def test_an_error_leaves_no_tensor_without_memory(data: tuple[Tensor, Tensor]) -> None:
    made = []

    def fails(conv: Conv, x: Tensor, edges: Tensor) -> Tensor:
        made.append((conv.lin(x), x))
        raise RuntimeError("on purpose")

    model = gact_graph.wrap(Net(Conv(fails)), level="lossless", blocks=4096, min_bytes=0)
    with pytest.raises(RuntimeError, match="on purpose"):
        model(*data)
    [(product, x)] = made
    torch.testing.assert_close(product, x @ model.conv.lin.weight.t())
