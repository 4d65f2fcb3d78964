"""Layers whose product is summed before it is computed, and whose bias takes the sum's memory."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextvars import ContextVar
from typing import Any

import pytest
import torch
from samples import seeded
from torch import Tensor, nn
from torch_geometric.nn import GATConv, GATv2Conv, GCNConv, MessagePassing
from torch_geometric.utils import scatter

import gact_graph
from gact_graph.capture.shared_sums import SharedSums
from gact_graph.support.current import Product

NODES, EDGES, WIDTH = 3000, 20000, 16
STEPS = 4

_KEPT = ContextVar[list[Tensor]]("kept")
"""Tensors that a layer in this file keeps for later, where no analysis of the layer finds them."""


class Conv(MessagePassing):
    """Multiplies by a weight, sums over neighbors, and adds a bias: as a body has it."""

    def __init__(self) -> None:
        super().__init__()
        self.lin = nn.Linear(WIDTH, WIDTH, bias=False)
        self.frozen = nn.Linear(WIDTH, WIDTH, bias=False).requires_grad_(False)
        self.bias = nn.Parameter(torch.randn(WIDTH))
        self.calls = 0

    def __call__(self, x: Tensor, edge_index: Tensor) -> Tensor:
        self.calls += 1
        return super().__call__(x, edge_index)

    def message(self, x_j: Tensor) -> Tensor:
        return x_j


def plain(conv: Conv, x: Tensor, edges: Tensor) -> Tensor:
    return conv.propagate(edges, x=conv.lin(x)) + conv.bias


def with_variables(conv: Conv, x: Tensor, edges: Tensor) -> Tensor:
    x = conv.lin(x)
    out = conv.propagate(edges, x=x)
    out = out + conv.bias
    return out


def product_after_sum(conv: Conv, x: Tensor, edges: Tensor) -> Tensor:
    y = conv.lin(x)
    return conv.propagate(edges, x=y) + y


def product_before_sum(conv: Conv, x: Tensor, edges: Tensor) -> Tensor:
    y = conv.lin(x)
    return conv.propagate(edges, x=y) * y.mean()


def product_for_later(conv: Conv, x: Tensor, edges: Tensor) -> Tensor:
    y = conv.lin(x)
    _KEPT.get().append(y)
    return conv.propagate(edges, x=y) + conv.bias


def transposed_product(conv: Conv, x: Tensor, edges: Tensor) -> Tensor:
    y = conv.lin(x)
    turned = y.T
    return conv.propagate(edges, x=y) + turned.T


def product_in_numpy(conv: Conv, x: Tensor, edges: Tensor) -> Tensor:
    y = conv.lin(x)
    factor = float(y.detach().numpy().max())
    return conv.propagate(edges, x=y) * factor


def address_of_product(conv: Conv, x: Tensor, edges: Tensor) -> Tensor:
    y = conv.lin(x)
    assert y.data_ptr() and y.untyped_storage().nbytes() == y.nbytes
    return conv.propagate(edges, x=y) + conv.bias


def input_changed_after_product(conv: Conv, x: Tensor, edges: Tensor) -> Tensor:
    copied = x * 1
    y = conv.frozen(copied)
    copied.mul_(3)
    return conv.propagate(edges, x=y) + copied


def sum_twice(conv: Conv, x: Tensor, edges: Tensor) -> Tensor:
    y = conv.lin(x)
    return conv.propagate(edges, x=y) + conv.propagate(edges, x=y)


def sum_after_bias(conv: Conv, x: Tensor, edges: Tensor) -> Tensor:
    out = conv.propagate(edges, x=conv.lin(x))
    return (out + conv.bias) * out


def view_after_bias(conv: Conv, x: Tensor, edges: Tensor) -> Tensor:
    out = conv.propagate(edges, x=conv.lin(x))
    turned = out.t()
    return (out + conv.bias) * turned.t()


def two_views(conv: Conv, x: Tensor, edges: Tensor) -> Tensor:
    out = conv.propagate(edges, x=conv.lin(x))
    out = out.view(-1, 4, WIDTH // 4)
    out = out.view(-1, WIDTH)
    return out + conv.bias


def sum_doubled(conv: Conv, x: Tensor, edges: Tensor) -> Tensor:
    out = conv.propagate(edges, x=conv.lin(x))
    return out + out


def sum_needed_in_later_calls(conv: Conv, x: Tensor, edges: Tensor) -> Tensor:
    """As ``with_variables`` in the calls from which the library learns."""
    out = conv.propagate(edges, x=conv.lin(x))
    before = out if conv.calls > 2 else None
    out = out + conv.bias
    return out if before is None else out * before


def sum_for_later(conv: Conv, x: Tensor, edges: Tensor) -> Tensor:
    out = conv.propagate(edges, x=conv.lin(x))
    if conv.calls > 2:
        _KEPT.get().append(out)
    return out + conv.bias


def product_in_vmap(conv: Conv, x: Tensor, edges: Tensor) -> Tensor:
    y = conv.lin(x)
    z = torch.func.vmap(lambda row: row * row.sigmoid())(y)
    return conv.propagate(edges, x=y) + z


def product_with_tangent(conv: Conv, x: Tensor, edges: Tensor) -> Tensor:
    y = conv.lin(x)
    out, tangent = torch.func.jvp(torch.tanh, (y,), (y,))
    return conv.propagate(edges, x=out) + tangent


def sum_in_vmap(conv: Conv, x: Tensor, edges: Tensor) -> Tensor:
    """As ``with_variables`` in the calls from which the library learns."""
    out = conv.propagate(edges, x=conv.lin(x))
    before = out if conv.calls > 2 else None
    out = out + conv.bias
    return out if before is None else out * torch.func.vmap(torch.sigmoid)(before)


BODIES = {
    body.__name__: body
    for body in (
        *(plain, with_variables, product_after_sum, product_before_sum, product_for_later),
        *(transposed_product, product_in_numpy, address_of_product, input_changed_after_product),
        *(sum_twice, sum_after_bias, view_after_bias, two_views, sum_doubled),
        *(sum_needed_in_later_calls, sum_for_later),
        *(product_in_vmap, product_with_tangent, sum_in_vmap),
    )
}
CONVS = {
    name: type(name, (Conv,), {"forward": body, "__module__": __name__})
    for name, body in BODIES.items()
}


class Net(nn.Module):
    def __init__(self, conv: nn.Module, width: int = WIDTH) -> None:
        super().__init__()
        self.first, self.conv, self.last = nn.Linear(8, WIDTH), conv, nn.Linear(width, 3)

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        _KEPT.get().clear()
        x = self.conv(self.first(x).relu(), edge_index)
        total = self.last(x.tanh())
        # What a layer has kept is read after its forward.
        return total + sum(kept.sum() for kept in _KEPT.get())


@pytest.fixture
def data() -> tuple[Tensor, Tensor]:
    generator = seeded(1)
    edges = torch.randint(NODES, (2, EDGES), generator=generator)
    return torch.randn(NODES, 8, generator=generator), edges


@pytest.fixture(autouse=True)
def _none_kept() -> Iterator[None]:
    token = _KEPT.set([])
    yield
    _KEPT.reset(token)


@pytest.fixture
def as_in_pyg(monkeypatch: pytest.MonkeyPatch) -> None:
    """Count the layers of this file as layers of PyG."""
    monkeypatch.setattr("gact_graph.capture.postponed._LAYERS", frozenset(CONVS.values()))
    monkeypatch.setattr("gact_graph.capture.shared_sums._LAYERS", __name__)


@pytest.fixture
def written(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Grows with the number of rows of each product that is computed late or in parts."""
    rows, write = list[int](), Product.write

    def counted(product: Product, result: Tensor) -> None:
        rows.append(len(result))
        write(product, result)

    monkeypatch.setattr(Product, "write", counted)
    return rows


@pytest.fixture
def shared(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Grows with each sum of a layer whose memory the sum with the bias takes."""
    calls, share = list[Any](), SharedSums._share

    def counted(sums: SharedSums, call: Any) -> Any:
        calls.append(call.name)
        return share(sums, call)

    monkeypatch.setattr(SharedSums, "_share", counted)
    return calls


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
            if not own.requires_grad:
                continue
            torch.testing.assert_close(own.grad, other.grad, rtol=1e-3, atol=1e-5)
    return wrapped


@pytest.mark.usefixtures("as_in_pyg")
@pytest.mark.parametrize("name", BODIES)
def test_any_layer_computes_what_it_computes_in_stock(
    name: str, data: tuple[Tensor, Tensor], written: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gact_graph.layers.blocks.weighted_sum._SUMMED_BYTES", 1000 * WIDTH * 4)
    _compare(Net(CONVS[name]()), *data, level="lossless")
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
        net = Net(conv, conv(torch.zeros(9, WIDTH), data[1] % 9).size(1))
        model = gact_graph.wrap(copy.deepcopy(net), min_bytes=0, **options)
        for _ in range(STEPS):
            out = model(*data)
            torch.testing.assert_close(out, net(*data), rtol=1e-4, atol=1e-5)
            out.sum().backward()
    if make is GCNConv:
        assert written and max(written) <= NODES


class Inherits(GCNConv):
    """Reads what the layer of PyG returns, before it ends."""

    def forward(self, *args: Any) -> Tensor:
        return super().forward(*args)


def test_a_layer_of_the_user_is_not_trusted(
    data: tuple[Tensor, Tensor], written: list[int], shared: list[Any]
) -> None:
    """Its code could read memory without an operation of PyTorch."""
    for conv in (CONVS["plain"](), Inherits(WIDTH, WIDTH)):
        _compare(Net(conv), *data, level="lossless")
    assert not written and not shared


def test_hooks_of_others_get_values(
    data: tuple[Tensor, Tensor], written: list[int], shared: list[Any]
) -> None:
    """Of each kind, on the layer and on its linear module."""

    def hook(*args: Any) -> None: ...

    layer = ("forward_hook", "full_backward_hook", "full_backward_pre_hook")
    phases = ("propagate_forward_pre_hook", "propagate_forward_hook")
    pairs = [("conv", kind) for kind in (*layer, *phases)] + [("conv.lin", kind) for kind in layer]
    for path, kind in pairs:
        net = Net(GCNConv(WIDTH, WIDTH))
        getattr(net.get_submodule(path), f"register_{kind}")(hook)
        _compare(net, *data, level="lossless")
        assert not written and (not shared or path == "conv.lin"), (path, kind)
        shared.clear()
    net = Net(GCNConv(WIDTH, WIDTH))
    with nn.modules.module.register_module_forward_hook(hook):
        _compare(net, *data, level="lossless")
    assert not written and not shared


def test_a_layer_without_hooks_of_the_library_is_not_trusted(
    data: tuple[Tensor, Tensor], written: list[int], shared: list[Any]
) -> None:
    """Nothing would report its end."""
    conv, inside = GCNConv(WIDTH, WIDTH), GCNConv(WIDTH, WIDTH)
    model = gact_graph.wrap(conv, level="lossless", min_bytes=0, blocks=4096)
    nets = [Net(inside), Net(nn.Identity())]
    nets[1].layers = [inside]  # no submodule
    nets[1].forward = lambda x, edges: nets[1].layers[0](nets[1].first(x), edges)
    for net in (lambda x, edges: model(x.repeat(1, 2), edges), gact_graph.wrap(nets[1])):
        for _ in range(3):
            net(*data).sum().backward()
    assert not written and not shared


def test_what_a_layer_returns_has_memory(
    data: tuple[Tensor, Tensor], monkeypatch: pytest.MonkeyPatch, written: list[int]
) -> None:
    def returns(conv: Conv, x: Tensor, edges: Tensor) -> Tensor:
        return conv.lin(x)

    kind = type("Returns", (Conv,), {"forward": returns, "__module__": __name__})
    monkeypatch.setattr("gact_graph.capture.postponed._LAYERS", frozenset({kind}))
    sizes = []

    class Reads(Net):
        def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
            out = self.conv(self.first(x), edge_index)
            with torch._C.DisableTorchFunction():  # unseen
                sizes.append(out.untyped_storage().nbytes())
            return out

    model = gact_graph.wrap(Reads(kind()), level="lossless", min_bytes=0, blocks=4096)
    model(*data).sum().backward()
    assert written == [NODES] and sizes == [NODES * WIDTH * 4]


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


def test_an_error_leaves_no_tensor_without_memory(
    data: tuple[Tensor, Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    made = []

    def fails(conv: Conv, x: Tensor, edges: Tensor) -> Tensor:
        made.append((conv.lin(x), x))
        raise RuntimeError("on purpose")

    kind = type("Fails", (Conv,), {"forward": fails, "__module__": __name__})
    monkeypatch.setattr("gact_graph.capture.postponed._LAYERS", frozenset({kind}))
    model = gact_graph.wrap(Net(kind()), level="lossless", blocks=4096, min_bytes=0)
    with pytest.raises(RuntimeError, match="on purpose"):
        model(*data)
    [(product, x)] = made
    torch.testing.assert_close(product, x @ model.conv.lin.weight.t())
