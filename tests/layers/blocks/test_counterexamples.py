"""Layers that an attack on the proofs found: each gave another result in blocks than in PyG."""

from __future__ import annotations

import copy
import dataclasses
import functools
import sys
import types
import warnings
from collections import ChainMap, UserDict
from collections.abc import Callable, Iterable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from samples import make, seeded
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook
from torch.utils.checkpoint import checkpoint
from torch_geometric import EdgeIndex
from torch_geometric.nn import (
    EdgeConv,
    GATConv,
    GCNConv,
    MessagePassing,
    MetaLayer,
    SAGEConv,
    Sequential,
)

import gact_graph

NODES = 40
X = torch.randn(NODES, 6, generator=seeded(0), dtype=torch.float64)
EDGES = torch.randint(NODES - 6, (2, 150), generator=seeded(1))
OPTIONS = {"level": "lossless", "blocks": 8, "min_bytes": 0}


class Layer(MessagePassing):
    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        return self.propagate(edge_index, x=x)

    def message(self, x_j: Tensor) -> Tensor:
        return x_j


class Twice(Layer):
    def propagate(self, edge_index: Tensor, x: Tensor) -> Tensor:
        return super().propagate(edge_index, x=x) * 2


class TwiceAttention(Layer):
    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        return self.propagate(edge_index, x=x, a=self.edge_updater(edge_index, x=x))

    def edge_updater(self, edge_index: Tensor, x: Tensor) -> Tensor:
        return super().edge_updater(edge_index, x=x) * 2

    def edge_update(self, x_j: Tensor) -> Tensor:
        return x_j.sin()

    def message(self, x_j: Tensor, a: Tensor) -> Tensor:
        return x_j * a


class TwoViews(Layer):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(2, 4, generator=seeded(2), dtype=torch.float64))

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        return self.propagate(edge_index, x=x, a=self.weight[0], b=self.weight[1])

    def message(self, x_j: Tensor, a: Tensor, b: Tensor) -> Tensor:
        return torch.tanh(x_j * a) * b


class Count(MessagePassing):
    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        return self.propagate(edge_index, x=x)

    def message(self, x_j: Tensor, dim_size: int) -> Tensor:
        return x_j * torch.full((1,), 1.0 / dim_size, dtype=x_j.dtype)


class CountOfEdges(Layer):
    def message(self, x_j: Tensor) -> Tensor:
        return x_j * torch.full_like(x_j, x_j.size(0))


class CountAsBound(MessagePassing):
    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        return self.propagate(edge_index, x=x)

    def message(self, x_j: Tensor, dim_size: int) -> Tensor:
        return torch.where(x_j > 0, x_j, dim_size)


class CountInARange(MessagePassing):
    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        return self.propagate(edge_index, x=x)

    def message(self, x_j: Tensor, dim_size: int) -> Tensor:
        return x_j * torch.arange(dim_size, dim_size + 4)


class Inference(Layer):
    def message(self, x_j: Tensor) -> Tensor:
        with torch.inference_mode():
            weight = x_j.sigmoid()
        return x_j * weight.clone()


class AssignsData(Layer):
    def message(self, x_j: Tensor) -> Tensor:
        h = x_j.clone()
        h.data = h.data.sign()
        return h


class OneEdge(Layer):
    def message(self, x_j: Tensor) -> Tensor:
        return x_j * 10 if x_j.size(0) == 1 else x_j


class OwnSum(Layer):
    """An aggregation that another function computes."""

    def __init__(self, function: Callable[[Tensor, Tensor, int], Tensor]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        return self.propagate(edge_index, x=x)

    def message(self, x_j: Tensor) -> Tensor:
        return x_j.tanh()

    def aggregate(self, inputs: Tensor, index: Tensor, dim_size: int) -> Tensor:
        return self.function(inputs, index, dim_size)


def added(inputs: Tensor, index: Tensor, dim_size: int) -> Tensor:
    return inputs.new_zeros(dim_size, inputs.size(1)).index_add(0, index, inputs)


def mean_without_a_bound(inputs: Tensor, index: Tensor, dim_size: int) -> Tensor:
    counts = inputs.new_zeros(dim_size).index_add(0, index, torch.ones_like(inputs[:, 0]))
    return (added(inputs, index, dim_size) / counts.view(-1, 1)).nan_to_num(nan=7.0)


def fewer_columns(inputs: Tensor, index: Tensor, dim_size: int) -> Tensor:
    zeros = inputs.new_zeros(dim_size, 6)
    return zeros.scatter_add(0, index.view(-1, 1).expand_as(inputs), inputs)


def windows(inputs: Tensor, index: Tensor, dim_size: int) -> Tensor:
    return added(inputs, index, dim_size + 1).unfold(0, 2, 1).sum(-1)


def flat_numbers(inputs: Tensor, index: Tensor, dim_size: int) -> Tensor:
    sums = added(inputs, index, dim_size)
    return added(inputs * sums.view(-1).index_select(0, index).view(-1, 1), index, dim_size)


def one_divisor(inputs: Tensor, index: Tensor, dim_size: int) -> Tensor:
    return added(inputs, index, dim_size) / inputs.new_full((1, 1), 3.0)


def two_nodes(inputs: Tensor, index: Tensor, dim_size: int) -> Tensor:
    return added(inputs, index.bool().long(), dim_size)


def numbers_as_bytes(inputs: Tensor, index: Tensor, dim_size: int) -> Tensor:
    return added(inputs, index.view(torch.float64).long(), dim_size)


class Code(Layer):
    """Writes into views of a tensor."""

    def message(self, x_j: Tensor) -> Tensor:
        length = x_j.detach().norm(dim=-1, keepdim=True)
        code = x_j.new_zeros(x_j.size(0), 4)
        torch.sin(length, out=code[:, 0:1])
        torch.cos(length, out=code[:, 1:2])
        return x_j * code


class Slopes(Layer):
    def __init__(self) -> None:
        super().__init__()
        self.act = nn.LeakyReLU(0.1)

    def message(self, x_j: Tensor) -> Tensor:
        for module in self.children():
            x_j = module(x_j) if isinstance(module, nn.LeakyReLU) else x_j
        return x_j


class DefaultOfMessage(Layer):
    def message(self, x_j: Tensor, negate: bool = False) -> Tensor:
        return -x_j.sin() if negate else x_j.sin()


class DefaultOfUpdate(Layer):
    def update(self, inputs: Tensor, act: bool = False) -> Tensor:
        return inputs.relu() if act else inputs


class NoArgument(Layer):
    def message(self, x_j: Tensor, weight: Tensor | None = None) -> Tensor:
        return x_j if weight is None else x_j * weight


class WithModule(Layer):
    """A module on messages, and a context around it."""

    def __init__(self, module: nn.Module, context: Callable[[], Any] = nullcontext) -> None:
        super().__init__()
        self.module, self.context = module, context

    def message(self, x_j: Tensor) -> Tensor:
        with self.context():
            return self.module(x_j)


class Checkpointed(WithModule):
    def message(self, x_j: Tensor) -> Tensor:
        return checkpoint(self.module, x_j, use_reentrant=False)


class Embedded(Layer):
    def __init__(self, **options: bool) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.table = nn.Embedding(3, 4, **options).double()

    def message(self, x_j: Tensor) -> Tensor:
        return x_j * self.table((x_j[:, 0] > 0).long())


SCALE = 1.0


class GlobalScale(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.tanh() * SCALE


class Configured(Layer):
    """Multiplies messages by a number of its configuration."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.config = config

    def message(self, x_j: Tensor) -> Tensor:
        return x_j * self.config["alpha"]


class RaisingAttributes(dict[str, Any]):
    __getattr__ = dict.__getitem__


class AnyAttribute(dict[str, Any]):
    __getattr__ = dict.get


class Expanded(Layer):
    def __init__(self) -> None:
        super().__init__()
        scale = torch.full((1,), 0.5, dtype=torch.float64).expand(4)
        self.register_buffer("scale", scale, persistent=False)

    def message(self, x_j: Tensor) -> Tensor:
        return x_j * self.scale


class OfANumber(MessagePassing):
    def __init__(self) -> None:
        super().__init__()
        self.factor = nn.Parameter(torch.tensor(2.0, dtype=torch.float64))

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        return x + self.propagate(edge_index, factor=self.factor.exp(), size=(len(x), len(x)))

    def message(self, factor: Tensor, index: Tensor) -> Tensor:
        return factor.expand(index.size(0), 1)


class Seeded(Layer):
    def message(self, x_j: Tensor) -> Tensor:
        torch.manual_seed(0)
        return x_j * torch.rand_like(x_j)


class NamesOfPatches(MessagePassing):
    def __init__(self) -> None:
        super().__init__()
        self.inner = mlp()

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        return self.propagate(edge_index, x=x, module=self.inner, worker=3.0)

    def message(self, x_j: Tensor, module: nn.Module, worker: float) -> Tensor:
        return module(x_j) * worker


def mlp() -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4)).double()


class Net(nn.Module):
    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.lin, self.layer = nn.Linear(6, 4).double(), layer

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        return self.layer(self.lin(x), edge_index)


def step(model: nn.Module, edge_index: Tensor) -> list[Tensor]:
    model.zero_grad()
    out = model(X, edge_index)
    out.square().sum().backward()
    return [out.detach(), *(p.grad.clone() for p in model.parameters() if p.grad is not None)]


def replaced() -> nn.Module:
    layer = Layer()
    propagate = layer.propagate
    layer.propagate = lambda *args, **kwargs: propagate(*args, **kwargs) * 3  # type: ignore[method-assign]
    return layer


LAYERS: dict[str, Callable[[], nn.Module]] = {
    "its own propagate": Twice,
    "its own edge_updater": TwiceAttention,
    "a propagate of the instance": replaced,
    "views of one parameter": TwoViews,
    "a count as a value": Count,
    "the count of edges as a value": CountOfEdges,
    "a count in a choice": CountAsBound,
    "a count in a range": CountInARange,
    "inference mode": Inference,
    "data that is assigned": AssignsData,
    "a mean of no messages": lambda: OwnSum(mean_without_a_bound),
    "sums of fewer columns": lambda: OwnSum(fewer_columns),
    "windows of nodes": lambda: OwnSum(windows),
    "numbers of nodes in a flat tensor": lambda: OwnSum(flat_numbers),
    "numbers of nodes as booleans": lambda: OwnSum(two_nodes),
    "numbers of nodes as bytes": lambda: OwnSum(numbers_as_bytes),
    "results in views of another tensor": Code,
    "one divisor": lambda: OwnSum(one_divisor),
    "a default of message": DefaultOfMessage,
    "a default of update": DefaultOfUpdate,
    "an argument that is not passed": NoArgument,
    "a checkpoint in message": lambda: Checkpointed(mlp()),
    "hooks in message": lambda: WithModule(mlp(), torch.autograd.graph.save_on_cpu),
    "a batch norm in evaluation": lambda: WithModule(nn.BatchNorm1d(4).double().eval()),
    "an embedding whose gradient counts": lambda: Embedded(scale_grad_by_freq=True),
    "an embedding with a sparse gradient": lambda: Embedded(sparse=True),
    "a dictionary whose attributes raise": lambda: Configured(RaisingAttributes(alpha=2.0)),
    "a dictionary with any attribute": lambda: Configured(AnyAttribute(alpha=2.0)),
    "an expanded buffer": Expanded,
    "a number alone": OfANumber,
    "a seed": Seeded,
    "arguments named as those of a patch": NamesOfPatches,
    "a dropout of everything": lambda: GATConv(4, 4, dropout=1.0).double(),
}


@pytest.mark.parametrize("name", LAYERS)
def test_as_stock(name: str) -> None:
    stock = Net(LAYERS[name]())
    model = gact_graph.wrap(Net(LAYERS[name]()), **OPTIONS)
    model.load_state_dict(stock.state_dict())
    for _ in range(2):
        for own, expected in zip(step(model, EDGES), step(stock, EDGES), strict=True):
            torch.testing.assert_close(own, expected, rtol=1e-9, atol=1e-9)


def test_a_single_edge() -> None:
    stock, model = Net(OneEdge()), gact_graph.wrap(Net(OneEdge()), **OPTIONS)
    for edges in (EDGES, EDGES[:, :1]):
        for own, expected in zip(step(model, edges), step(stock, edges), strict=True):
            torch.testing.assert_close(own, expected, rtol=1e-9, atol=1e-9)


def test_a_global_of_a_submodule_that_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    stock = Net(WithModule(GlobalScale()))
    model = gact_graph.wrap(Net(WithModule(GlobalScale())), **OPTIONS)
    for scale in (1.0, 3.0):
        monkeypatch.setattr(sys.modules[__name__], "SCALE", scale)
        for own, expected in zip(step(model, EDGES), step(stock, EDGES), strict=True):
            torch.testing.assert_close(own, expected, rtol=1e-9, atol=1e-9)


@dataclasses.dataclass
class Settings:
    alpha: float

    def __getitem__(self, name: str) -> float:
        return float(getattr(self, name))


Settings.__module__ = "torch.settings"  # as a class of an installed package


@pytest.mark.parametrize("kind", [types.MappingProxyType, lambda held: Settings(**held)])
def test_layers_with_other_settings_that_cannot_be_hashed(kind: Callable[..., Any]) -> None:
    settings = [kind({"alpha": alpha}) for alpha in (1.0, 3.0)]
    model = gact_graph.wrap(Stack(Configured(s) for s in settings), **OPTIONS)
    stock = Stack(Configured(s) for s in settings)
    for own, expected in zip(step(model, EDGES), step(stock, EDGES), strict=True):
        torch.testing.assert_close(own, expected, rtol=1e-9, atol=1e-9)


class Stack(nn.Module):
    def __init__(self, layers: Iterable[nn.Module]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.lin, self.layers = nn.Linear(6, 4).double(), nn.ModuleList(layers)

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        x = self.lin(x)
        for layer in self.layers:
            x = layer(x, edge_index)
        return x


def test_the_sizes_of_an_edge_index() -> None:
    edges = EdgeIndex(torch.stack([EDGES[0], EDGES[1] % 10]), sparse_size=(NODES, 10))
    conv = make(lambda: SAGEConv((6, 6), 4, root_weight=False).double())
    expected = conv((X, None), edges)
    own = gact_graph.wrap(conv, **OPTIONS)((X, None), edges)
    assert gact_graph.report(conv).layers[0].way == "blocks"
    torch.testing.assert_close(own, expected, rtol=1e-9, atol=1e-9)


class DropsMessages(Layer):
    def message(self, x_j: Tensor) -> Tensor:
        return nn.functional.dropout(x_j, 0.5, self.training)


@pytest.mark.parametrize("reentrant", [True, False])
def test_a_checkpoint_between_calls_that_are_decided_otherwise(reentrant: bool) -> None:
    class Checkpoint(Net):
        def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
            x = self.lin(x)
            return checkpoint(self.layer, x, edge_index, use_reentrant=reentrant)

    model = gact_graph.wrap(Checkpoint(DropsMessages()), **OPTIONS | {"blocks": "auto"})
    out = model(X, EDGES)
    model(X.clone().requires_grad_(), EDGES)  # which may be differentiated twice
    torch.manual_seed(3)
    weight = torch.randn_like(out)
    (out * weight).sum().backward()
    # Linear in the weight and the bias together, so the gradient times them is the loss.
    product = sum((p.grad * p).sum() for p in model.parameters() if p.grad is not None)
    torch.testing.assert_close(product, (out * weight).sum())


def test_a_meta_layer_whose_edge_model_is_a_function() -> None:
    class NodeModel(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lin = nn.Linear(4, 4).double()

        def forward(self, x: Tensor, edge_index: Tensor, edge_attr: Tensor, *_: None) -> Tensor:
            return self.lin(x).index_add(0, edge_index[1], edge_attr)

    class Meta(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.meta = MetaLayer(lambda source, target, *_: source - target, NodeModel())

        def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
            out: Tensor = self.meta(x, edge_index)[0]
            return out

    stock, model = Net(Meta()), gact_graph.wrap(Net(Meta()), **OPTIONS)
    model.load_state_dict(stock.state_dict())
    for own, expected in zip(step(model, EDGES), step(stock, EDGES), strict=True):
        torch.testing.assert_close(own, expected, rtol=1e-9, atol=1e-9)


def test_an_array_beside_tensors() -> None:
    attributes = {"weight": X[EDGES[0], :1].clone(), "cutoff": numpy.array([5.0])}

    def message(x_i: Tensor, x_j: Tensor, edge_attr: Any) -> Tensor:
        return x_j * edge_attr["weight"] * float(edge_attr["cutoff"][0])

    own, expected = (
        gact_graph.message_passing(message, X, EDGES, attributes, blocks=blocks)
        for blocks in (8, False)
    )
    torch.testing.assert_close(own, expected, rtol=1e-9, atol=1e-9)


class Squeezed(Layer):
    def message(self, x_j: Tensor, x_i: Tensor) -> Tensor:
        return (x_j.squeeze(0).unsqueeze(1) * x_i.unsqueeze(1)).sum(1)


def test_a_block_of_one_edge() -> None:
    edges = torch.stack([torch.arange(10), torch.arange(10).flip(0)])
    stock, model = Net(Squeezed()), gact_graph.wrap(Net(Squeezed()), **{**OPTIONS, "blocks": 1})
    for own, expected in zip(step(model, edges), step(stock, edges), strict=True):
        torch.testing.assert_close(own, expected, rtol=1e-9, atol=1e-9)


MODES: dict[str, Callable[[Tensor], bool]] = {
    "gradients": lambda x: torch.is_grad_enabled(),
    "inference": lambda x: torch.is_inference_mode_enabled(),
    "a gradient of its argument": lambda x: x.requires_grad,
}


@pytest.mark.parametrize("name", MODES)
def test_a_mode_that_messages_read(name: str) -> None:
    class ByMode(Layer):
        def __init__(self) -> None:
            super().__init__()
            self.x = nn.Parameter(X)

        def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
            return self.propagate(edge_index, x=self.x)

        def message(self, x_j: Tensor) -> Tensor:
            return x_j * 3 if MODES[name](x_j) else x_j

    stock, model = ByMode(), gact_graph.wrap(ByMode(), **OPTIONS)
    for mode in (nullcontext, torch.no_grad, torch.inference_mode, torch.no_grad, nullcontext):
        with mode():
            own, expected = model(X, EDGES), stock(X, EDGES)
        torch.testing.assert_close(own, expected, rtol=1e-9, atol=1e-9)


def test_a_gradient_that_the_layer_enables() -> None:
    class Enabled(Layer):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(4, dtype=torch.float64))

        def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
            return self.edge_updater(edge_index, x=x)

        @torch.enable_grad()
        def edge_update(self, x_j: Tensor) -> Tensor:
            return x_j * self.weight

    model = gact_graph.wrap(Net(Enabled()), **OPTIONS)
    with torch.no_grad():
        out = model(X, EDGES)
    out.sum().backward()
    torch.testing.assert_close(model.layer.weight.grad, model.lin(X)[EDGES[0]].sum(0))


WITHOUT_A_FILE = """
class Pair(MessagePassing):
    def forward(self, x, edge_index):
        pair = x, x.sin()
        return self.propagate(edge_index, x=pair, a=self.edge_updater(edge_index, x=pair))

    def edge_update(self, x_i, x_j):
        return (x_i - 2 * x_j).sigmoid()

    def message(self, x_i, x_j, a):
        return x_i * a + 3 * x_j
"""


def test_a_number_in_place_of_rows() -> None:
    """PyG's template passes None."""

    class Factored(Layer):
        def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
            return self.propagate(edge_index, x=x, factor=(3.0, None))

        def message(self, x_j: Tensor, factor_j: Any) -> Tensor:
            return x_j if factor_j is None else x_j * factor_j

    stock, model = Net(Factored()), gact_graph.wrap(Net(Factored()), **OPTIONS)
    for own, expected in zip(step(model, EDGES), step(stock, EDGES), strict=True):
        torch.testing.assert_close(own, expected, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("flow", ["source_to_target", "target_to_source"])
def test_a_pair_in_a_class_without_a_file(flow: str) -> None:
    names: dict[str, Any] = {"MessagePassing": MessagePassing}
    exec(WITHOUT_A_FILE, names)
    stock, model = Net(names["Pair"](flow=flow)), Net(names["Pair"](flow=flow))
    assert type(stock.layer).propagate is MessagePassing.propagate
    gact_graph.wrap(model, **OPTIONS)
    for own, expected in zip(step(model, EDGES), step(stock, EDGES), strict=True):
        torch.testing.assert_close(own, expected, rtol=1e-9, atol=1e-9)
    assert all(row.way == "blocks" for row in gact_graph.report(model).layers)


def test_a_setting_of_a_module_that_is_reached_by_children() -> None:
    stock, model = Net(Slopes()), gact_graph.wrap(Net(Slopes()), **OPTIONS)
    for slope in (0.1, 0.7):
        stock.layer.act.negative_slope = model.layer.act.negative_slope = slope
        for own, expected in zip(step(model, EDGES), step(stock, EDGES), strict=True):
            torch.testing.assert_close(own, expected, rtol=1e-9, atol=1e-9)


def test_a_detached_tensor_in_an_attribute_needs_no_gradient() -> None:
    class Keeps(Layer):
        last: Any = None

        def message(self, x_j: Tensor) -> Tensor:
            self.last = torch.sigmoid(x_j).detach()
            return x_j * self.last

    stock, model = Net(Keeps()), gact_graph.wrap(Net(Keeps()), **OPTIONS)
    for own, expected in zip(step(model, EDGES), step(stock, EDGES), strict=True):
        torch.testing.assert_close(own, expected, rtol=1e-9, atol=1e-9)
    assert any(row.way == "blocks" for row in gact_graph.report(model).layers)
    assert not model.layer.last.requires_grad
    torch.testing.assert_close(model.layer.last, stock.layer.last)
    copy.deepcopy(model)


def test_a_detached_result_needs_no_gradient() -> None:
    class Detached(Layer):
        def message(self, x_j: Tensor) -> Tensor:
            return x_j.detach()

    model = gact_graph.wrap(Net(Detached()), **OPTIONS)
    assert not model(X, EDGES).requires_grad


class Rows(Layer):
    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        return self.propagate(edge_index, x=x, size=(NODES, 1))

    def update(self, inputs: Tensor) -> Tensor:
        return inputs * 10 if inputs.size(0) == 1 else inputs


def test_one_destination() -> None:
    stock, model = Net(Rows()), gact_graph.wrap(Net(Rows()), **OPTIONS)
    edges = torch.stack([torch.arange(9), torch.zeros(9, dtype=torch.int64)])
    for own, expected in zip(step(model, edges), step(stock, edges), strict=True):
        torch.testing.assert_close(own, expected, rtol=1e-9, atol=1e-9)


class Table:
    """A factor behind a special method."""

    def __init__(self) -> None:
        self.values = [1.0]

    def __getitem__(self, i: int) -> float:
        return self.values[i]

    def __float__(self) -> float:
        return self.values[0]

    def __enter__(self) -> float:
        return self.values[0]

    def __exit__(self, *error: object) -> None:
        pass

    def __getattr__(self, name: str) -> float:
        return self.values[0]


def entered(table: Table) -> float:
    with table as factor:
        return factor


@pytest.mark.parametrize(
    "read",
    [lambda t: t[0], float, entered, lambda t: t.any_name],
    ids=["item", "float", "with", "name"],
)
def test_state_behind_special_methods(read: Callable[[Table], float]) -> None:
    class Scaled(Layer):
        def __init__(self) -> None:
            super().__init__()
            self.table = Table()

        def message(self, x_j: Tensor) -> Tensor:
            return x_j * read(self.table)

    follow(Scaled, lambda layer: layer.table.values.__setitem__(0, 3.0))


@pytest.mark.parametrize("holder", [UserDict, ChainMap, dict])
def test_state_in_a_mapping(holder: Callable[[dict[str, float]], Any]) -> None:
    class Scaled(Layer):
        def __init__(self) -> None:
            super().__init__()
            self.table = holder({"factor": 1.0})

        def message(self, x_j: Tensor) -> Tensor:
            return x_j * self.table["factor"]

    follow(Scaled, lambda layer: layer.table.__setitem__("factor", 3.0))


def test_a_forward_that_is_replaced() -> None:
    def replace(layer: Any) -> None:
        layer.module[1].forward = torch.sigmoid

    follow(lambda: WithModule(mlp()), replace)


def test_a_message_that_is_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    def message(self: Any, x_j: Tensor, edge_weight: Tensor | None) -> Tensor:
        return x_j.sin()

    def layer() -> nn.Module:
        torch.manual_seed(1)
        return GCNConv(4, 4).double()

    follow(layer, lambda layer: monkeypatch.setattr(GCNConv, "message", message))


def test_a_function_that_caches_results() -> None:
    @functools.cache
    def basis(size: int) -> Tensor:
        return torch.linspace(0.5, 1, size, dtype=torch.float64)

    class Scaled(Layer):
        def message(self, x_j: Tensor) -> Tensor:
            return x_j * basis(x_j.size(1))

    follow(Scaled, lambda layer: None)
    assert type(basis(4)) is Tensor


@pytest.mark.parametrize("everywhere", [False, True])
def test_hooks_of_modules_run(everywhere: bool) -> None:
    calls: list[Any] = []
    model = gact_graph.wrap(Net(WithModule(nn.Tanh())), **OPTIONS)
    if everywhere:
        handle = register_module_forward_hook(lambda module, *values: calls.append(module))
    else:
        handle = model.layer.module.register_full_backward_pre_hook(
            lambda module, *values: calls.append(module)
        )
    try:
        step(model, EDGES)
        step(model, EDGES)
    finally:
        handle.remove()
    assert [type(module) for module in calls].count(nn.Tanh) == 2


def follow(make: Callable[[], nn.Module], change: Callable[[Any], None]) -> None:
    """Compare with stock before and after a change of the layer."""
    stock, model = Net(make()), gact_graph.wrap(Net(make()), **OPTIONS)
    for change_now in (False, True):
        if change_now:
            change(stock.layer)
            change(model.layer)
        for _ in range(2):
            for own, expected in zip(step(model, EDGES), step(stock, EDGES), strict=True):
                torch.testing.assert_close(own, expected, rtol=1e-9, atol=1e-9)


def test_second_derivatives_after_an_evaluation_in_inference_mode() -> None:
    model = gact_graph.wrap(Net(GATConv(4, 4, dropout=0.5).double()), **OPTIONS)
    with torch.inference_mode():
        model.eval()(X, EDGES)
    x = X.clone().requires_grad_()
    [gradient] = torch.autograd.grad(model.train()(x, EDGES).square().sum(), x, create_graph=True)
    gradient.square().sum().backward()
    assert x.grad is not None and x.grad.isfinite().all()


def test_rows_of_a_negative_view() -> None:
    class Negative(Net):
        def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
            return self.layer(torch._neg_view(self.lin(x)), edge_index)

    def build() -> nn.Module:
        torch.manual_seed(1)
        inner = nn.Sequential(nn.Linear(128, 32), nn.Tanh()).double()
        net = Negative(EdgeConv(inner, aggr="add"))
        net.lin = nn.Linear(6, 64).double()
        return net

    x, edges = X.repeat(50, 1), torch.randint(50 * NODES, (2, 8000), generator=seeded(4))
    found = []
    for blocks in (False, 1000):
        model = build()
        gact_graph.wrap(model, bits=16, blocks=blocks, adaptive=False, min_bytes=0)
        model(x, edges).square().sum().backward()
        found.append(torch.cat([p.grad.flatten() for p in model.parameters()]))
    assert (found[0] - found[1]).norm() < 1e-2 * found[0].norm()


class Differentiates(Layer):
    """Its message is a gradient."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.way = way

    def message(self, x_j: Tensor) -> Tensor:
        if self.way == "grad":
            return torch.autograd.grad(x_j.pow(3).sum(), x_j, create_graph=True)[0] + x_j
        leaf = x_j.detach().requires_grad_()
        if self.way == "Tensor.backward":
            leaf.pow(3).sum().backward()
        else:
            torch.autograd.backward(leaf.pow(3).sum())
        assert leaf.grad is not None
        return x_j * leaf.grad


@pytest.mark.parametrize("way", ["grad", "Tensor.backward", "backward"])
def test_messages_that_are_gradients(way: str) -> None:
    expected = step(Net(Differentiates(way)), EDGES)
    model = gact_graph.wrap(Net(Differentiates(way)), **OPTIONS)
    torch.testing.assert_close(step(model, EDGES), expected)
    (row,) = gact_graph.report(model).layers
    assert row.reason == "differentiates while it makes messages"


def test_gradients_of_a_weight_in_many_blocks() -> None:
    """A sum in bfloat16 of one small term for each block would not grow beyond 256."""
    dtype = torch.bfloat16

    class Scaled(Layer):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.ones(1, 1, dtype=dtype))

        def message(self, x_j: Tensor) -> Tensor:
            return x_j * self.scale

    edges = torch.arange(8192).remainder(1024).view(1, -1).repeat(2, 1)
    model = Net(Scaled())
    model.lin = nn.Identity()  # type: ignore[assignment]
    gact_graph.wrap(model, **OPTIONS)
    (model(torch.ones(1024, 1, dtype=dtype), edges) / 8).sum().backward()
    (scale,) = model.parameters()
    assert scale.grad is not None and scale.grad.dtype == dtype and float(scale.grad) == 1024


def test_an_inference_tensor_beside_tensors() -> None:
    class Shifted(Layer):
        def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
            return self.propagate(edge_index, x=x, shift=self.shift)

        def message(self, x_j: Tensor, shift: Tensor) -> Tensor:
            return (x_j + shift).exp()

    layer = Shifted()
    with torch.inference_mode():
        layer.shift = torch.ones(4, dtype=X.dtype)
    expected = step(Net(layer), EDGES)
    model = gact_graph.wrap(Net(layer), **OPTIONS)
    torch.testing.assert_close(step(model, EDGES), expected)
    (row,) = gact_graph.report(model).layers
    assert row.reason == "reads an inference tensor, which autograd does not save"


def test_a_read_only_buffer(tmp_path: Path) -> None:
    """A write to a map of a file ends the process."""

    class WithTable(Layer):
        def __init__(self, table: Tensor) -> None:
            super().__init__()
            self.register_buffer("table", table)

        def message(self, x_j: Tensor) -> Tensor:
            return torch.tanh(x_j + self.table)

    numpy.save(tmp_path / "table.npy", numpy.linspace(0, 1, 4))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns that the array is not writable
        table = torch.from_numpy(numpy.load(tmp_path / "table.npy", mmap_mode="r"))
    expected = step(Net(WithTable(table)), EDGES)
    model = gact_graph.wrap(Net(WithTable(table)), **OPTIONS)
    torch.testing.assert_close(step(model, EDGES), expected)


def test_forwards_that_pyg_makes() -> None:
    """Sequential modules with other parts, and with the same parts and other paths between them."""

    def parts(last: str | None) -> list[Any]:
        if last is None:
            return [(nn.Linear(8, 4), "x -> x")]
        branches = [(nn.Linear(8, 4), "x -> h"), (nn.Tanh(), "h -> a"), (nn.Softplus(), "h -> b")]
        return [*branches, (nn.Linear(4, 4), f"{last} -> x")]

    for last in (None, "a", "b"):
        stock = Net(EdgeConv(Sequential("x", parts(last)).double(), aggr="add"))
        model = Net(EdgeConv(Sequential("x", parts(last)).double(), aggr="add"))
        model.load_state_dict(stock.state_dict())
        gact_graph.wrap(model, **OPTIONS)
        torch.testing.assert_close(step(model, EDGES), step(stock, EDGES))
        assert {row.way for row in gact_graph.report(model).layers} == {"blocks"}
