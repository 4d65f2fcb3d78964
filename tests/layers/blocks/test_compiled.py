"""Edge work in compiled graphs: results and gradients of stock, and causes of recompilation."""

from __future__ import annotations

import copy
import gc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch.utils.checkpoint import checkpoint
from torch_geometric.nn import (
    GAT,
    GCN,
    GIN,
    PNA,
    GATConv,
    GraphSAGE,
    MessagePassing,
    MetaLayer,
    SAGEConv,
    TransformerConv,
)

import gact_graph
from gact_graph.layers.blocks import graph_operators, graph_work

NODES, CHANNELS = 300, 16

# Dynamo looks at the gradient of a tensor that has none.
pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")


def inputs(nodes: int = NODES, seed: int = 0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    edges = torch.randint(nodes, (2, 6 * nodes), generator=generator)
    x = torch.randn(nodes, CHANNELS, generator=generator, dtype=torch.float64)
    return x, edges


class EdgeModel(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3 * CHANNELS, CHANNELS)

    def forward(self, src: Tensor, dst: Tensor, edge_attr: Tensor, u: Any, batch: Any) -> Tensor:
        return self.linear(torch.cat([src, dst, edge_attr], 1)).tanh()


class NodeModel(nn.Module):
    def forward(
        self, x: Tensor, edge_index: Tensor, edge_attr: Tensor, u: Any, batch: Any
    ) -> Tensor:
        return x.new_zeros(len(x), CHANNELS).index_add_(0, edge_index[1], edge_attr)


class Meta(nn.Module):
    """A MetaLayer: its edge model makes a row for each edge."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = MetaLayer(EdgeModel(), NodeModel())

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        return self.layer(x, edge_index, x[edge_index[0]] - x[edge_index[1]])[0]


class Transformers(nn.Module):
    """Layers that leave their attention in an attribute."""

    def __init__(self) -> None:
        super().__init__()
        self.first = TransformerConv(CHANNELS, 4, heads=4)
        self.last = TransformerConv(CHANNELS, 5)

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        out, (_, weights) = self.first(x, edge_index, return_attention_weights=True)
        return self.last(out.relu(), edge_index) + weights.square().mean()


class Bipartite(nn.Module):
    """The first half of the nodes gets messages from all, without a tensor of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = SAGEConv((CHANNELS, CHANNELS), 5, root_weight=False)

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        half = x.size(0) // 2
        return self.conv((x, None), edge_index % half, size=(x.size(0), half))


MODELS: dict[str, Callable[[], nn.Module]] = {
    "GCN": lambda: GCN(CHANNELS, 16, 2, 5, norm="batch_norm"),
    "GAT": lambda: GAT(CHANNELS, 16, 2, 5, heads=2),
    "GATv2": lambda: GAT(CHANNELS, 16, 2, 5, heads=2, v2=True),
    "GraphSAGE": lambda: GraphSAGE(CHANNELS, 16, 2, 5),
    "GIN": lambda: GIN(CHANNELS, 16, 2, 5),
    "PNA": lambda: PNA(
        CHANNELS, 16, 2, 5, aggregators=["mean", "max"], scalers=["identity"], deg=torch.ones(9)
    ),
    "MetaLayer": Meta,
    "TransformerConv": Transformers,
    "bipartite": Bipartite,
}


def some(*names: str) -> list[Any]:
    """All models, of which the others run among the long tests."""
    long = pytest.mark.long
    return [name if name in names else pytest.param(name, marks=long) for name in MODELS]


def made(name: str) -> nn.Module:
    torch.manual_seed(0)
    return MODELS[name]().double()


def wrapped(model: nn.Module, backend: Any, **options: Any) -> Any:
    own: Any = torch.compile(model, backend=backend, fullgraph=True)
    options = {"level": "lossless", "blocks": 500, "min_bytes": 0} | options
    return gact_graph.wrap(own, **options)


def step(model: Any, *arguments: Any) -> tuple[Tensor, Tensor]:
    """The output of a model, and the gradient of a loss."""
    model.zero_grad()
    output = model(*arguments)
    (output * torch.linspace(-1, 2, output.numel()).view(output.shape)).sum().backward()
    gradients = [p.grad.flatten() for p in model.parameters() if p.grad is not None]
    return output.detach(), torch.cat(gradients)


def ways(model: Any) -> set[str]:
    return {row.way for row in gact_graph.report(model).layers}


@pytest.mark.parametrize("name", some("GCN", "GAT", "MetaLayer", "TransformerConv"))
def test_of_stock(name: str, backend: Any) -> None:
    model = wrapped(made(name), backend)
    for number in range(2):
        expected = step(made(name), *inputs(seed=number))
        torch.testing.assert_close(step(model, *inputs(seed=number)), expected)
        assert ways(model) == {"blocks"}
    assert backend.frame_count == 1


@pytest.mark.parametrize("name", some("GAT"))
def test_evaluation(name: str, backend: Any) -> None:
    model = wrapped(made(name), backend).eval()
    with torch.no_grad():
        torch.testing.assert_close(model(*inputs()), made(name).eval()(*inputs()))


@pytest.mark.parametrize("name", some("GAT"))
def test_graphs_of_any_size(name: str, backend: Any) -> None:
    model = wrapped(made(name), backend)
    for nodes in (300, 200, 450):
        torch.testing.assert_close(step(model, *inputs(nodes)), step(made(name), *inputs(nodes)))
    assert backend.frame_count == 2  # the second is for any size


def test_graphs_do_not_save_messages_or_edges(backend: Any) -> None:
    reports = []
    for blocks in (500, False):
        torch.compiler.reset()
        own = CompileCounterWithBackend("aot_eager")
        model = wrapped(made("GAT"), own, blocks=blocks)
        step(model, *inputs())
        reports.append(gact_graph.report(model).stored_bytes)
    assert reports[0] < 0.8 * reports[1]


def test_attention_is_computed_again(decomposed: Any) -> None:
    """Its weights take more than the scores of nodes."""
    model = wrapped(made("GAT"), decomposed, level="L1")
    torch.testing.assert_close(step(model, *inputs())[0], step(made("GAT"), *inputs())[0])
    x, edges = inputs()
    weights = 2 * (edges.size(1) + NODES) * x.element_size()
    assert gact_graph.report(model).stored_bytes < 2 * weights


def test_codes(backend: Any) -> None:
    model = wrapped(made("GAT").float(), backend, level="L1", bits=4)
    x, edges = inputs()
    _, expected = step(made("GAT").float(), x.float(), edges)
    draws = torch.stack([step(model, x.float(), edges)[1] for _ in range(32)])
    once = (draws[0] - expected).norm() / expected.norm()
    assert 1e-4 < once < 0.25
    assert (draws.mean(0) - expected).norm() / expected.norm() < 0.45 * once
    rows = [row for row in gact_graph.report(model).contexts if row.codec == "quantize"]
    assert {row.shape[0] for row in rows} >= {NODES}  # those of layers, not of messages


class Dropped(MessagePassing):
    """A sum of rows with random weights, linear in x."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1, dtype=torch.float64))

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        return self.propagate(edge_index, x=x, w=self.weight.expand(edge_index.size(1)))

    def message(self, x_j: Tensor, w: Tensor) -> Tensor:
        return F.dropout(w.view(-1, 1), 0.5) * x_j


@pytest.mark.parametrize("name", ["a sum", "attention"])
def test_backward_repeats_the_noise_of_forward(name: str, backend: Any) -> None:
    """A linear function equals the product of its input and its gradient."""
    if name == "a sum":
        layer: nn.Module = Dropped()
    else:
        layer = GATConv(CHANNELS, CHANNELS, dropout=0.5, bias=False).double()
        for vector in (layer.att_src, layer.att_dst):  # equal scores, so that the sum is linear
            vector.data.zero_()
    model, (x, edges) = wrapped(layer, backend), inputs()
    x.requires_grad_()
    outputs = []
    for _ in range(2):
        output = model(x, edges)
        torch.rand(1)  # the random state moves on
        weight = torch.randn(output.shape, dtype=output.dtype)
        (gradient,) = torch.autograd.grad((output * weight).sum(), x)
        torch.testing.assert_close((gradient * x).sum(), (output * weight).sum())
        outputs.append(output.detach())
    assert (outputs[0] - outputs[1]).abs().max() > 0.1
    torch.manual_seed(7)
    first = model(x, edges)
    torch.manual_seed(7)
    assert torch.equal(model(x, edges), first)


def test_inside_of_a_checkpoint(backend: Any) -> None:
    class Checkpointed(GIN):
        def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
            run = super().forward
            out: Tensor = checkpoint(lambda x: run(x, edge_index), x, use_reentrant=False)
            return out.sin()

    torch.manual_seed(0)
    stock = Checkpointed(CHANNELS, 16, 2, 5).double()
    model = wrapped(copy.deepcopy(stock), backend)
    torch.testing.assert_close(step(model, *inputs()), step(stock, *inputs()))
    assert ways(model) == {"blocks"}


def test_a_setting_that_changes(backend: Any) -> None:
    model, stock = wrapped(made("GAT"), backend), made("GAT")
    for slope in (0.9, 0.5, 0.3, 0.05):  # of which a compiler makes a symbol
        for conv in (model._orig_mod.convs[0], stock.convs[0]):
            conv.negative_slope = slope
        torch.testing.assert_close(step(model, *inputs()), step(stock, *inputs()))


class LaterScaled(MessagePassing):
    """A layer whose scale may be set later."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(CHANNELS, 5)
        self.scale: float | None = None

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        return self.propagate(edge_index, x=self.linear(x))

    def message(self, x_j: Tensor) -> Tensor:
        return x_j.tanh() if self.scale is None else x_j.tanh() * self.scale


def test_a_setting_that_was_none(backend: Any) -> None:
    stock = LaterScaled().double()
    model = wrapped(copy.deepcopy(stock), backend)
    for scale in (None, 3.0, None):
        stock.scale = model._orig_mod.scale = scale
        torch.testing.assert_close(step(model, *inputs()), step(stock, *inputs()))
        assert ways(model) == {"blocks"}


class OfAtoms(MessagePassing):
    """Scales messages in float32 by a row in float64 for the kind of their source."""

    def __init__(self) -> None:
        super().__init__()
        rows = torch.linspace(-1, 2, 3 * CHANNELS, dtype=torch.float64)
        self.scale = nn.Parameter(rows.view(3, CHANNELS))

    def forward(self, x: Tensor, edge_index: Tensor, atom: Tensor) -> Tensor:
        return self.propagate(edge_index, x=x, atom=atom)

    def message(self, x_j: Tensor, atom_j: Tensor) -> Tensor:
        return x_j * self.scale[atom_j.squeeze(1)]


class OfTasks(MessagePassing):
    """Multiplies by a literal tensor of the present task, and leaves a detached tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.lin, self.task = nn.Linear(CHANNELS, CHANNELS).double(), "a"
        self.weights = {"a": [1.0] * CHANNELS, "b": [3.0] * CHANNELS}
        self.last: Any = None

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        return self.propagate(edge_index, x=self.lin(x))

    def message(self, x_j: Tensor) -> Tensor:
        weight = torch.tensor(self.weights[self.task], dtype=torch.float64)
        self.last = x_j.detach()
        return x_j.tanh() * weight


def test_literal_tensors_in_turns(backend: Any) -> None:
    torch.manual_seed(0)
    stock = OfTasks()
    conv = copy.deepcopy(stock)
    model = wrapped(conv, backend)
    for task in ("a", "b", "a"):
        stock.task = conv.task = task
        torch.testing.assert_close(step(model, *inputs()), step(stock, *inputs()))
    assert not conv.last.requires_grad


def test_tensors_of_several_dtypes(backend: Any) -> None:
    """The first one is of int64."""
    model, (x, edges), atom = (
        wrapped(OfAtoms(), backend),
        inputs(),
        torch.arange(NODES)[:, None] % 3,
    )
    x = x.float().requires_grad_()
    torch.testing.assert_close(step(model, x, edges, atom), step(OfAtoms(), x, edges, atom))
    assert ways(model) == {"blocks"}
    tensors = [atom, x.detach(), model._orig_mod.scale.detach()]
    check_operators(edges, tensors, [False, True, True])


def test_edges_that_change_in_place(backend: Any) -> None:
    model, (x, edges) = wrapped(made("GIN"), backend), inputs()
    step(model, x, edges)
    edges.numpy()[:] = inputs(seed=5)[1].numpy()  # without a trace in the version
    torch.testing.assert_close(step(model, x, edges), step(made("GIN"), x, edges))


def test_backward_after_many_forwards(backend: Any) -> None:
    """The order of its edges lives until then."""
    model, stock, (x, edges) = wrapped(made("GIN"), backend), made("GIN"), inputs()
    output, expected = model(x, edges), stock(x, edges)
    with torch.no_grad():
        for seed in range(1, 12):
            model(x, inputs(seed=seed)[1])
    gc.collect()
    output.sum().backward()
    expected.sum().backward()
    for own, right in zip(model.parameters(), stock.parameters(), strict=True):
        torch.testing.assert_close(own.grad, right.grad)


def test_orders_are_dropped_with_their_graphs(backend: Any) -> None:
    model = wrapped(made("GIN"), backend)
    gc.collect()  # what earlier tests left
    before = len(graph_work._orders)
    for seed in range(12):
        step(model, *inputs(seed=seed))
    gc.collect()
    assert len(graph_work._orders) - before < 8


def test_a_copy_of_a_model_that_was_compiled(backend: Any, tmp_path: Path) -> None:
    model = made("GAT")
    model.compile(backend=backend, fullgraph=True)
    gact_graph.wrap(model, level="lossless", blocks=500, min_bytes=0)
    step(model, *inputs())
    other = copy.deepcopy(model)
    torch.save(model, tmp_path / "model.pt")
    loaded = torch.load(tmp_path / "model.pt", weights_only=False)
    expected = step(made("GAT"), *inputs(seed=1))
    del model
    for own in (other, loaded):
        torch.testing.assert_close(step(own, *inputs(seed=1)), expected)
        assert ways(own) == {"blocks"}


@pytest.mark.parametrize("row", [0, 1])
def test_edges_of_no_node(row: int, backend: Any) -> None:
    model, (x, edges) = wrapped(made("GIN"), backend), inputs()
    edges[row, 3] = NODES
    with pytest.raises(IndexError, match=f"node {NODES}"):
        model(x, edges)


class Cumulative(MessagePassing):
    """A layer whose messages depend on those before."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(CHANNELS, CHANNELS)

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        return self.propagate(edge_index, x=self.linear(x))

    def message(self, x_j: Tensor) -> Tensor:
        return x_j.cumsum(0)


def test_layers_that_run_as_in_pyg(backend: Any) -> None:
    stock = Cumulative().double()
    model = wrapped(copy.deepcopy(stock), backend)
    torch.testing.assert_close(step(model, *inputs()), step(stock, *inputs()))
    (row,) = gact_graph.report(model).layers
    assert row.way == "stock" and "cumsum" in str(row.reason)


def test_small_layers_run_as_in_pyg(backend: Any) -> None:
    """Also where the number of edges depends on values, as after loops are removed."""
    for min_bytes, way in ((1 << 24, "stock"), (1 << 10, "blocks")):
        own = CompileCounterWithBackend("aot_eager")
        model = wrapped(made("GCN"), own, blocks="auto", min_bytes=min_bytes)
        torch.testing.assert_close(step(model, *inputs()), step(made("GCN"), *inputs()))
        assert ways(model) == {way}
        torch.compiler.reset()


def test_autocast(backend: Any) -> None:
    model, stock, (x, edges) = wrapped(made("GIN").float(), backend), made("GIN").float(), inputs()
    with torch.autocast("cpu", torch.bfloat16):
        torch.testing.assert_close(model(x.float(), edges), stock(x.float(), edges))
    assert {row.reason for row in gact_graph.report(model).layers} == {"is compiled under autocast"}


def test_a_compiled_layer_of_a_model_that_is_not(backend: Any) -> None:
    model = made("GIN")
    model.convs[0].compile(backend=backend)
    gact_graph.wrap(model, level="lossless", blocks=500, min_bytes=0)
    torch.testing.assert_close(step(model, *inputs()), step(made("GIN"), *inputs()))
    assert gact_graph.report(model).layers[-1].way == "blocks"


def test_operators_keep_the_promises_of_pytorch(backend: Any) -> None:
    model, (x, edges) = wrapped(made("GIN"), backend), inputs()
    step(model, x, edges)
    width = graph_operators.works[last_work()].rows[0][-1]
    check_operators(edges, [torch.randn(NODES, width, dtype=x.dtype)], [True])


def last_work() -> str:
    return max(graph_operators.works, key=lambda key: int(key.split()[1].rstrip(":")))


def check_operators(edges: Tensor, tensors: list[Tensor], needed: list[bool]) -> None:
    name, sizes = last_work(), [edges.size(1), NODES, NODES]
    operators, tests = torch.ops.gact_graph_edges, ("test_schema", "test_faketensor")
    torch.library.opcheck(operators.sort_edges.default, (name, edges, sizes), test_utils=tests)
    state = operators.sort_edges(name, edges, sizes)
    forward = name, tensors, state, sizes
    torch.library.opcheck(operators.edge_forward.default, forward, test_utils=tests)
    (out,) = operators.edge_forward(*forward)
    never_read = graph_operators.works[name].analysis.never_read
    saved = [tensor for i, tensor in enumerate(tensors) if i not in never_read]
    backward = name, saved, state, [torch.ones_like(out)], sizes, needed
    torch.library.opcheck(operators.edge_backward.default, backward, test_utils=tests)


@pytest.mark.long
@pytest.mark.parametrize("name", MODELS)
def test_inductor(name: str) -> None:
    torch.compiler.reset()
    stock = made(name)
    for module in stock.modules():
        if hasattr(module, "add_self_loops"):  # inductor fails on graphs that remove such loops
            module.add_self_loops = False
    own: Any = torch.compile(copy.deepcopy(stock), fullgraph=True)
    model = gact_graph.wrap(own, level="lossless", blocks=500, min_bytes=0)
    try:
        for nodes in (NODES, 400):
            torch.testing.assert_close(step(model, *inputs(nodes)), step(stock, *inputs(nodes)))
            assert ways(model) == {"blocks"}
    finally:
        torch.compiler.reset()


def test_backward_after_unwrap() -> None:
    x, edges = inputs()
    found = []
    for wraps in (False, True):
        torch.manual_seed(0)
        model: Any = torch.compile(GIN(CHANNELS, CHANNELS, 2, 5).double(), backend="aot_eager")
        if wraps:
            gact_graph.wrap(model, level="lossless", blocks=500, min_bytes=0)
        out = model(x, edges)
        if wraps:
            assert {row.way for row in gact_graph.report(model).layers} == {"blocks"}
            gact_graph.unwrap(model)
        out.square().sum().backward()
        found.append([p.grad for p in model.parameters()])
    torch.testing.assert_close(*found)
