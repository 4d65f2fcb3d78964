"""Messages of a function, beside the same written by hand with scatter."""

from __future__ import annotations

import functools
import gc
import warnings
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from samples import one_thread  # noqa: F401
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import checkpoint
from torch_geometric.utils import scatter

import gact_graph

NODES, EDGES, WIDTH = 200, 3000, 8
GENERATOR = torch.Generator().manual_seed(0)
X = torch.randn(NODES, WIDTH, generator=GENERATOR, dtype=torch.float64)
E = torch.randn(EDGES, 4, generator=GENERATOR, dtype=torch.float64)
EDGE_INDEX = torch.randint(NODES - 20, (2, EDGES), generator=GENERATOR)
BLOCKS = 200
EXACT: dict[str, Any] = {"level": "lossless", "adaptive": False, "min_bytes": 0}


def by_hand(
    message: Any,
    x: Any,
    edge_index: Tensor,
    edge_attr: Any = None,
    reduce: str | None = "sum",
    dim_size: int | None = None,
) -> Tensor:
    source, destination = x if isinstance(x, tuple) else (x, x)
    x_i = None if destination is None else destination[edge_index[1]]
    out: Tensor = message(x_i, source[edge_index[0]], edge_attr)
    if reduce is None:
        return out
    size = len(destination) if dim_size is None else dim_size
    return scatter(out, edge_index[1], 0, size, reduce)


def in_blocks(*args: Any, **kwargs: Any) -> Tensor:
    return gact_graph.message_passing(*args, **({"blocks": BLOCKS} | kwargs))


BOTH: tuple[Callable[..., Tensor], Callable[..., Tensor]] = (in_blocks, by_hand)


class Mlp(nn.Module):
    """The edge model of MeshGraphNets."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.first = nn.Linear(2 * WIDTH + 4, 16, dtype=torch.float64)
        self.second = nn.Linear(16, 5, dtype=torch.float64)
        self.dropout = dropout

    def forward(self, x_i: Tensor, x_j: Tensor, edge_attr: Tensor) -> Tensor:
        hidden = self.first(torch.cat([x_i, x_j, edge_attr], dim=-1)).relu()
        out: Tensor = self.second(F.dropout(hidden, self.dropout, self.training))
        return out


def outcome(run: Any, inputs: list[Tensor], parameters: list[Tensor]) -> list[Tensor]:
    """The result of a run and all gradients."""
    leaves = [t.detach().clone().requires_grad_() for t in inputs]
    for parameter in parameters:
        parameter.grad = None
    out = run(*leaves)
    weight = torch.linspace(-1, 1, out.numel(), dtype=out.dtype).view(out.shape)
    (out * weight).sum().backward()
    gradients = [leaf.grad for leaf in leaves] + [p.grad for p in parameters]
    assert all(g is not None for g in gradients)
    return [out.detach(), *(g.clone() for g in gradients if g is not None)]


def agree(actual: list[Tensor], expected: list[Tensor]) -> None:
    for result, wanted in zip(actual, expected, strict=True):
        torch.testing.assert_close(result, wanted, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("reduce", ["sum", "mean", "max", "min", None])
@pytest.mark.parametrize("blocks", [BLOCKS, EDGES * 2, "auto", False])
def test_a_module_as_by_hand(reduce: str | None, blocks: Any) -> None:
    mlp = Mlp()
    actual, expected = (
        outcome(functools.partial(_call, run, mlp, reduce, options), [X, E], [*mlp.parameters()])
        for run, options in ((in_blocks, {"blocks": blocks}), (by_hand, {}))
    )
    agree(actual, expected)


def _call(
    run: Any, message: Any, reduce: str | None, options: Any, x: Tensor, edge_attr: Tensor
) -> Any:
    return run(message, x, EDGE_INDEX, edge_attr, reduce=reduce, **options)


GLOBAL_MLP = Mlp()


def _helper(x_i: Tensor, x_j: Tensor, edge_attr: Tensor) -> Tensor:
    return 2 * GLOBAL_MLP(x_i, x_j, edge_attr)


def _through_a_helper(x_i: Tensor, x_j: Tensor, edge_attr: Tensor) -> Tensor:
    return _helper(x_i, x_j, edge_attr) + 1


def _recursive(x_i: Tensor, x_j: Tensor, edge_attr: Tensor, depth: int = 2) -> Tensor:
    if depth:
        return _recursive(x_i, x_j * 2, edge_attr, depth - 1)
    return x_i * x_j


class Layers(nn.Module):
    """Message passing written by hand, in the ways that people write it."""

    def __init__(self) -> None:
        super().__init__()
        self.mlps = nn.ModuleList(Mlp() for _ in range(3))
        self.weight = nn.Parameter(torch.randn(5, dtype=torch.float64, generator=GENERATOR))
        self.gate = nn.Linear(4, 5, dtype=torch.float64)
        self.scale = 1.0

    def of_method(self, x_i: Tensor, x_j: Tensor, edge_attr: Tensor) -> Tensor:
        return self.mlps[0](x_i, x_j, edge_attr) * self.weight * self.scale

    def method(self, run: Any, x: Tensor, edge_attr: Tensor) -> Tensor:
        out: Tensor = run(self.of_method, x, EDGE_INDEX, edge_attr)
        return out

    def loop(self, run: Any, x: Tensor, edge_attr: Tensor) -> Tensor:
        """By the time of backward, the variable ``mlp`` is the last layer, and ``k`` is 3."""
        out = torch.zeros(NODES, 5, dtype=x.dtype)
        for k, mlp in enumerate(self.mlps, 1):
            out = out + run(lambda i, j, e: k * mlp(i, j, e), x, EDGE_INDEX, edge_attr)  # noqa: B023
        return out

    def closure(self, run: Any, x: Tensor, edge_attr: Tensor) -> Tensor:
        gate = self.gate(edge_attr.mean(0))  # neither a leaf nor a parameter
        norms = {"of all": gate.square().sum(), "constant": torch.tensor(2.0)}
        mlps = [self.mlps[1], self.mlps[2]]

        def activated(value: Tensor) -> Tensor:
            return value.tanh() * gate

        def message(x_i: Tensor, x_j: Tensor, edge_attr: Tensor, *, sign: int = -1) -> Tensor:
            total = sum(mlp(x_i, x_j, edge_attr) for mlp in mlps)
            return sign * activated(total) / norms["of all"] * norms["constant"]

        out: Tensor = run(message, x, EDGE_INDEX, edge_attr)
        return out

    def partial(self, run: Any, x: Tensor, edge_attr: Tensor) -> Tensor:
        def message(weight: Tensor, mlp: Any, x_i: Tensor, x_j: Tensor, e: Tensor) -> Tensor:
            return mlp(x_i, x_j, e) * weight

        out: Tensor = run(
            functools.partial(message, self.weight, self.mlps[0]), x, EDGE_INDEX, edge_attr
        )
        return out

    def globals(self, run: Any, x: Tensor, edge_attr: Tensor) -> Tensor:
        out: Tensor = run(_through_a_helper, x, EDGE_INDEX, edge_attr)
        return out


@pytest.mark.parametrize("way", ["method", "loop", "closure", "partial", "globals"])
def test_functions_that_reach_parameters(way: str) -> None:
    layers = Layers()
    parameters: list[Tensor] = {
        "method": [layers.weight, *layers.mlps[0].parameters()],
        "loop": [*layers.mlps.parameters()],
        "closure": [*layers.gate.parameters(), *layers.mlps[1].parameters()],
        "partial": [layers.weight, *layers.mlps[0].parameters()],
        "globals": [*GLOBAL_MLP.parameters()],
    }[way]
    actual, expected = (
        outcome(functools.partial(getattr(layers, way), run), [X, E], parameters) for run in BOTH
    )
    agree(actual, expected)


def test_a_function_that_calls_itself() -> None:
    actual, expected = (
        outcome(lambda x, run=run: run(_recursive, x, EDGE_INDEX), [X], []) for run in BOTH
    )
    agree(actual, expected)


def test_attributes_set_after_forward_change_no_gradient() -> None:
    layers, results = Layers(), []
    for changes in (False, True):
        x = X.clone().requires_grad_()
        out = layers.method(in_blocks, x, E)
        if changes:
            layers.scale = 5.0
        out.sum().backward()
        results.append(x.grad)
    assert torch.equal(*results)


def test_backward_has_the_masks_of_forward() -> None:
    mlp, x = Mlp(dropout=0.5), X.clone().requires_grad_()
    linear = functools.partial(_linear, mlp)
    out = in_blocks(linear, x, EDGE_INDEX, E)
    state = torch.get_rng_state()
    out.sum().backward()
    assert torch.equal(torch.get_rng_state(), state)
    assert x.grad is not None
    assert (x.grad * x).sum().item() == pytest.approx(out.sum().item(), rel=1e-9)
    assert not torch.equal(in_blocks(linear, x, EDGE_INDEX, E), out)


def _linear(mlp: Any, x_i: Tensor, x_j: Tensor, edge_attr: Tensor) -> Tensor:
    return F.dropout(x_j @ mlp.first.weight[:, :WIDTH].t(), mlp.dropout, mlp.training)


def test_without_gradients_or_in_evaluation() -> None:
    mlp = Mlp(dropout=0.5).eval()
    with torch.no_grad():
        actual = in_blocks(mlp, X, EDGE_INDEX, E)
        agree([actual], [by_hand(mlp, X, EDGE_INDEX, E)])
    assert not actual.requires_grad
    frozen = in_blocks(mlp.requires_grad_(False), X, EDGE_INDEX, E)
    assert not frozen.requires_grad


def test_a_pair_of_sources_and_destinations() -> None:
    mlp, destinations = Mlp(), X[:50].flip(0)
    edge_index = torch.stack([EDGE_INDEX[0], EDGE_INDEX[1] % 50])
    actual, expected = (
        outcome(
            lambda s, d, e, run=run: run(mlp, (s, d), edge_index, e),
            [X, destinations, E],
            [*mlp.parameters()],
        )
        for run in BOTH
    )
    agree(actual, expected)


def test_sources_alone() -> None:
    def message(x_i: None, x_j: Tensor, edge_attr: Tensor) -> Tensor:
        assert x_i is None
        return x_j * edge_attr[:, :1]

    actual, expected = (
        outcome(
            lambda x, e, run=run: run(message, (x, None), EDGE_INDEX, e, dim_size=NODES),
            [X, E],
            [],
        )
        for run in BOTH
    )
    agree(actual, expected)
    with pytest.raises(ValueError, match=r"number of destination nodes .* pass dim_size"):
        in_blocks(message, (X, None), EDGE_INDEX, E)
    each = in_blocks(message, (X, None), EDGE_INDEX, E, reduce=None)
    agree([each], [by_hand(message, (X, None), EDGE_INDEX, E, reduce=None)])


def test_the_first_nodes_are_destinations() -> None:
    mlp = Mlp()
    edge_index = torch.stack([EDGE_INDEX[0], EDGE_INDEX[1] % 60])
    actual, expected = (
        outcome(
            lambda x, e, run=run: run(mlp, x, edge_index, e, dim_size=60),
            [X, E],
            [*mlp.parameters()],
        )
        for run in BOTH
    )
    assert len(actual[0]) == 60
    agree(actual, expected)


def test_nested_tensors_of_nodes_and_edges() -> None:
    mlp, position = Mlp(), torch.randn(NODES, 3, generator=GENERATOR, dtype=torch.float64)

    def message(x_i: Any, x_j: Any, edges: Any) -> Tensor:
        distance = (x_i["position"] - x_j["position"]).norm(dim=-1, keepdim=True)
        out: Tensor = mlp(x_i["x"], x_j["x"], edges[0]) * distance * edges[1]["weight"]
        return out

    def forward(run: Any, x: Tensor, position: Tensor, edge_attr: Tensor, weight: Tensor) -> Tensor:
        if run is in_blocks:
            nodes = {"x": x, "position": position}
            out: Tensor = run(message, nodes, EDGE_INDEX, [edge_attr, {"weight": weight}, 2])
            return out
        i, j = EDGE_INDEX[1], EDGE_INDEX[0]
        ends = ({"x": x[k], "position": position[k]} for k in (i, j))
        return scatter(message(*ends, [edge_attr, {"weight": weight}]), i, 0, NODES, "sum")

    weight = torch.rand(EDGES, 1, generator=GENERATOR, dtype=torch.float64)
    actual, expected = (
        outcome(functools.partial(forward, run), [X, position, E, weight], [*mlp.parameters()])
        for run in BOTH
    )
    agree(actual, expected)


def test_no_tensor_of_all_messages_is_made_or_saved() -> None:
    mlp, sizes = Mlp(), []

    class Watched(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None):
            out = func(*args, **(kwargs or {}))
            if isinstance(out, Tensor) and out.is_floating_point():
                sizes.append(out.numel())
            return out

    saved: list[int] = []
    x, edge_attr = X.clone().requires_grad_(), E.clone()
    with Watched(), torch.autograd.set_multithreading_enabled(False):
        with saved_tensors_hooks(lambda t: saved.append(t.numel()) or t, lambda t: t):
            out = in_blocks(mlp, x, EDGE_INDEX, edge_attr)
        out.sum().backward()
    assert max(sizes) <= EDGES * 4  # edge_attr
    assert max(saved) == EDGES * 4
    assert sum(saved) <= 2 * sum(t.numel() for t in (x, edge_attr, *mlp.parameters()))


def test_the_graph_dies_with_the_result() -> None:
    mlp, x = Mlp(), X.clone().requires_grad_()
    out = in_blocks(lambda i, j, e: mlp(i, j, e), x, EDGE_INDEX, E)
    gone = weakref.ref(out.grad_fn)
    gc.disable()
    try:
        del out
        assert gone() is None
    finally:
        gc.enable()


def test_an_edge_index_that_changes_in_place() -> None:
    mlp, edge_index = Mlp(), EDGE_INDEX.clone()
    for _ in range(3):
        agree([in_blocks(mlp, X, edge_index, E)], [by_hand(mlp, X, edge_index, E)])
        edge_index.numpy()[1, :] = edge_index.numpy()[1, ::-1].copy()


def test_functions_not_local_to_edges_run_at_once_with_a_warning() -> None:
    norm = nn.BatchNorm1d(WIDTH, dtype=torch.float64)

    def message(x_i: Tensor, x_j: Tensor, edge_attr: Tensor) -> Tensor:
        out: Tensor = norm(x_j)
        return out

    expected = outcome(lambda x: by_hand(message, x, EDGE_INDEX), [X], [*norm.parameters()])
    with pytest.warns(
        RuntimeWarning, match=r"all edges at once, because .* changes norm\.num_batches"
    ) as caught:
        actual = outcome(lambda x: in_blocks(message, x, EDGE_INDEX), [X], [*norm.parameters()])
    agree(actual, expected)
    assert caught[0].filename == __file__
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        in_blocks(message, X, EDGE_INDEX)


class Plain:
    """Not a module: its parameters are found by the names in its code."""

    def __init__(self) -> None:
        self.mlp = Mlp()

    def __call__(self, x_i: Tensor, x_j: Tensor, edge_attr: Tensor) -> Tensor:
        out: Tensor = self.mlp(x_i, x_j, edge_attr)
        return out


def test_no_gradient_of_an_object_that_is_no_module_is_lost() -> None:
    plain = Plain()
    parameters = [*plain.mlp.parameters()]
    expected = outcome(lambda x, e: by_hand(plain, x, EDGE_INDEX, e), [X, E], parameters)
    actual = outcome(lambda x, e: in_blocks(plain, x, EDGE_INDEX, e), [X, E], parameters)
    agree(actual, expected)


def test_a_tensor_of_edges_among_the_variables() -> None:
    """Its rows are those of all edges, in the order of the caller."""
    with pytest.warns(RuntimeWarning, match="cannot be traced"):
        actual = outcome(lambda x: in_blocks(lambda i, j, _: j * E[:, :1], x, EDGE_INDEX), [X], [])
    agree(actual, outcome(lambda x: by_hand(lambda i, j, _: j * E[:, :1], x, EDGE_INDEX), [X], []))


def test_a_function_that_counts_its_calls() -> None:
    calls = 0

    def message(x_i: Tensor, x_j: Tensor, edge_attr: Tensor) -> Tensor:
        nonlocal calls
        calls += 1
        return x_j * 2

    with pytest.warns(RuntimeWarning, match="changes calls while it makes messages"):
        actual = in_blocks(message, X, EDGE_INDEX)
    agree([actual], [by_hand(lambda i, j, _: j * 2, X, EDGE_INDEX)])
    assert calls == 1


@pytest.mark.parametrize(("blocks", "times"), [(BLOCKS, 1), ("auto", 30)])
def test_a_model_learns_from_forces(blocks: Any, times: int) -> None:
    """Of a graph that has several blocks, by ``"auto"`` too."""
    edge_index, edge_attr = EDGE_INDEX.repeat(1, times), E.repeat(times, 1)
    results = []
    for run, options in ((in_blocks, {"blocks": blocks}), (by_hand, {})):
        mlp = Mlp()
        x = X.clone().requires_grad_()
        energy = run(mlp, x, edge_index, edge_attr, **options).square().sum()
        [force] = torch.autograd.grad(energy, x, create_graph=True)
        (energy + force.square().sum()).backward()
        results.append([x.grad, *(p.grad for p in mlp.parameters())])
    agree(*results)


def test_no_edges() -> None:
    assert torch.equal(
        in_blocks(Mlp(), X, EDGE_INDEX[:, :0], E[:0]), torch.zeros(NODES, 5, dtype=X.dtype)
    )


def test_checkpoint_around_it() -> None:
    mlp = Mlp(dropout=0.5)

    def run(x: Tensor, edge_attr: Tensor) -> Tensor:
        return in_blocks(mlp, x, EDGE_INDEX, edge_attr)

    def checked(x: Tensor, edge_attr: Tensor) -> Tensor:
        out: Tensor = checkpoint(run, x, edge_attr, use_reentrant=False)
        return out

    results = []
    for function in (run, checked):
        torch.manual_seed(0)
        results.append(outcome(function, [X, E], [*mlp.parameters()]))
    agree(*results)


def test_function_transforms() -> None:
    mlp = Mlp()
    results = [
        torch.func.grad(lambda x, run=run: run(mlp, x, EDGE_INDEX, E).square().sum())(X)
        for run in BOTH
    ]
    agree(results[:1], results[1:])


@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning", "ignore:.*deprecated")
def test_compilers() -> None:
    net = Net(in_blocks).eval()
    inputs = (X, EDGE_INDEX, E)
    expected = net(*inputs)
    for model in (net, gact_graph.wrap(Net(in_blocks).eval(), **EXACT)):
        programs = [
            torch.compile(model, backend="eager", fullgraph=True),
            torch.export.export(model, inputs, strict=False).module(),
            torch.jit.trace(model, inputs, check_trace=False),
        ]
        for program in programs:
            agree([program(*inputs)], [expected])


class Net(nn.Module):
    """Two steps of MeshGraphNets, written by hand."""

    def __init__(self, run: Any) -> None:
        super().__init__()
        self.edge_models = nn.ModuleList(Mlp() for _ in range(2))
        self.encoder = nn.Linear(WIDTH, WIDTH, dtype=torch.float64)
        self.node_model = nn.Linear(5 + WIDTH, WIDTH, dtype=torch.float64)
        self.run = run

    def forward(self, x: Tensor, edge_index: Tensor, edge_attr: Tensor) -> Tensor:
        x = self.encoder(x).relu()
        for edge_model in self.edge_models:
            messages = self.run(edge_model, x, edge_index, edge_attr)
            x = x + self.node_model(torch.cat([x, messages], dim=-1)).tanh()
        return x


@pytest.mark.parametrize("level", ["lossless", "CB2", "L0"])
def test_in_a_wrapped_model(level: str) -> None:
    torch.manual_seed(0)
    stock = Net(by_hand)
    torch.manual_seed(0)
    model = gact_graph.wrap(Net(in_blocks), **(EXACT | {"level": level, "bits": 32}))
    actual, expected = (
        outcome(lambda x, e, net=net: net(x, EDGE_INDEX, e), [X, E], [*net.parameters()])
        for net in (model, stock)
    )
    agree(actual, expected)
    rows = gact_graph.report(model).layers
    assert [row.slot for row in rows] == ["message_passing", "message_passing#2"]
    assert all(row.way == "blocks" and row.blocks and row.blocks > 5 for row in rows)
    slots = [row.slot for row in gact_graph.report(model).contexts]
    assert any(slot.startswith("message_passing") for slot in slots)


def test_true_is_auto() -> None:
    counts = []
    for blocks in (True, "auto"):
        model = gact_graph.wrap(Net(functools.partial(in_blocks, blocks=blocks)), **EXACT)
        model(X, EDGE_INDEX.repeat(1, 30), E.repeat(30, 1))
        counts.append([row.blocks for row in gact_graph.report(model).layers])
    assert counts[0] == counts[1] and None not in counts[0]


def test_sorting_the_edges_is_no_context() -> None:
    model = gact_graph.wrap(Net(in_blocks), min_bytes=16 << 20)
    out = model(X, EDGE_INDEX.repeat(1, 10), E.repeat(10, 1))
    assert gact_graph.report(model).layers[0].blocks is not None
    assert not any(row.role == "index" for row in gact_graph.report(model).contexts)
    out.sum().backward()


def test_its_contexts_are_coded_and_its_bits_found() -> None:
    torch.manual_seed(0)
    model = gact_graph.wrap(Net(in_blocks).float(), bits=4, min_bytes=0)
    x, edge_attr = X.float().repeat(20, 1), E.float()
    for _ in range(4):
        model(x, EDGE_INDEX, edge_attr).square().sum().backward()
    rows = {row.slot: row for row in gact_graph.report(model).contexts}
    coded = [row for slot, row in rows.items() if slot.startswith("message_passing")]
    assert any(row.codec == "quantize" and row.stored_bytes < 4 * row.numel / 3 for row in coded)
    assert gact_graph.report(model).measurements > 0


@pytest.mark.parametrize(
    ("change", "error", "match"),
    [
        ({"message": 3}, TypeError, "message to be callable"),
        ({"reduce": "mul"}, ValueError, "reduce to be 'sum', 'mean'"),
        ({"blocks": 0}, ValueError, "blocks of 1 to"),
        ({"edge_index": EDGE_INDEX.int()}, ValueError, "edge_index .2, E. of int64"),
        ({"edge_index": [[0], [1]]}, TypeError, "edge_index to be a tensor"),
        ({"edge_attr": E[1:]}, ValueError, "edge_attr to have a row for each of 3000 edges"),
        ({"x": [X, X[1:]]}, ValueError, "tensors of x with the same number of rows"),
        ({"dim_size": NODES + 1}, ValueError, "dim_size to be at most the 200 rows"),
        ({"dim_size": -1}, ValueError, "dim_size to be 0 or more"),
        ({"dim_size": "3"}, TypeError, "dim_size to be an int"),
        ({"x": (X, None), "dim_size": -1}, ValueError, "dim_size to be 0 or more"),
        ({"message": lambda i, j, e: j.sum()}, ValueError, "a row for each of 3000 edges"),
    ],
    ids=lambda value: str(value)[:20],
)
@pytest.mark.filterwarnings("ignore:gact_graph.message_passing makes")
def test_errors(change: dict[str, Any], error: type[Exception], match: str) -> None:
    arguments = {"message": Mlp(), "x": X, "edge_index": EDGE_INDEX, "edge_attr": E}
    with pytest.raises(error, match=match):
        in_blocks(**(arguments | change))


def test_an_edge_to_a_node_that_is_not_there() -> None:
    for blocks in (BLOCKS, False):
        with pytest.raises((IndexError, RuntimeError)):
            in_blocks(Mlp(), X[:100], EDGE_INDEX, E, blocks=blocks)
