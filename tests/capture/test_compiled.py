"""Compiled models: what their graphs save, the gradients, and that nothing compiles twice."""

from __future__ import annotations

import copy
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from fresh import run
from torch import Tensor, nn
from torch.fx.experimental.proxy_tensor import make_fx
from torch_geometric.nn import GAT, GCN

import gact_graph
from gact_graph.capture.compiled import Running, _running
from gact_graph.capture.config import Config
from gact_graph.capture.noise import Noise

NODES = 800

# Dynamo looks at the gradient of a tensor that has none.
pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")


def inputs(nodes: int = NODES) -> tuple[Tensor, ...]:
    generator = torch.Generator().manual_seed(nodes)
    edges = torch.randint(nodes, (2, 6 * nodes), generator=generator)
    return torch.randn(nodes, 32, generator=generator), edges


def gcn() -> nn.Module:
    torch.manual_seed(0)
    made: nn.Module = GCN(32, 32, 3, 4, norm="batch_norm", dropout=0.5, normalize=False)
    return made


def gat() -> nn.Module:
    torch.manual_seed(0)
    made: nn.Module = GAT(
        *(32, 32, 2, 4), heads=2, dropout=0.3, norm="layer_norm", add_self_loops=False
    )
    return made


class Attention(nn.Module):
    """Two layers of a transformer on rows of 32 features, and no graph."""

    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(32, 2, 64, 0.1, "gelu", batch_first=True)
        self.encoder, self.last = nn.TransformerEncoder(layer, 2), nn.Linear(32, 4)

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        out: Tensor = self.last(self.encoder(x.view(8, -1, 32))).flatten(0, 1)
        return out


def attention() -> nn.Module:
    torch.manual_seed(0)
    return Attention()


def gradient(model: nn.Module, x: Tensor, edges: Tensor, draw: int = 0) -> Tensor:
    model.zero_grad()
    torch.manual_seed(draw)
    out = model(x, edges)
    nn.functional.cross_entropy(out, torch.arange(len(out)) % 4).backward()
    grads = [p.grad.flatten() for p in model.parameters() if p.grad is not None]
    return torch.cat(grads)


def pair(make: Callable[[], nn.Module], backend: Any, **options: Any) -> tuple[nn.Module, Any]:
    """The compiled model, alone and wrapped. Layers run as in PyG: in blocks, dropout of attention
    draws other noise."""
    own: Any = torch.compile(make(), backend=backend)
    wrapped = gact_graph.wrap(own, blocks=False, **options)
    return torch.compile(make(), backend=copy.copy(backend)), wrapped


MODELS = pytest.mark.parametrize("make", [gcn, gat, attention])


@MODELS
def test_exact_forms_change_no_bit(make: Any, backend: Any) -> None:
    stock, model = pair(make, backend, level="lossless", min_bytes=0)
    assert torch.equal(gradient(model, *inputs()), gradient(stock, *inputs()))
    report = gact_graph.report(model)
    assert report.contexts and {row.codec for row in report.contexts} <= {"mask", "index", "keep"}
    assert report.stored_bytes < report.raw_bytes


@MODELS
def test_codes_are_small_and_their_noise_has_mean_zero(make: Any, decomposed: Any) -> None:
    stock, model = pair(make, decomposed, bits=4, min_bytes=0)
    expected = gradient(stock, *inputs())
    draws = [gradient(model, *inputs()) for _ in range(24)]
    once = (draws[0] - expected).norm() / expected.norm()
    mean = (torch.stack(draws).mean(0) - expected).norm() / expected.norm()
    assert 1e-4 < once < 0.25 and mean < 0.45 * once  # a fifth, if there were no bias at all
    rows = gact_graph.report(model).contexts
    codes = [row for row in rows if row.codec == "quantize"]
    assert codes and all(row.stored_bytes < 0.3 * row.raw_bytes for row in codes if row.bits == 4)
    assert gact_graph.report(model).rate > 2.5
    assert decomposed.frame_count == 1


def test_masks_are_saved_and_gathered_rows_and_the_results_of_norms_are_not(
    decomposed: Any,
) -> None:
    own: Any = torch.compile(gcn(), backend=decomposed)
    model = gact_graph.wrap(own, bits=4, min_bytes=0, blocks=False)
    gradient(model, *inputs())
    rows = gact_graph.report(model).contexts
    assert sum(row.codec == "mask" for row in rows) == 2  # of a ReLU and the dropout after it
    codes = [row.shape for row in rows if row.codec == "quantize"]
    assert codes == [(NODES, 32)] * 2  # the inputs of two norms, of which backward computes more
    assert gact_graph.report(model).rate > 6


class Masked(nn.Module):
    """A function of the results of a layer, between two layers."""

    def __init__(self, after: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(32, 32), nn.Linear(32, 4)
        self.after = after

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        out: Tensor = self.last(self.after(self.first(x)))
        return out


MASKED: dict[str, Callable[[Tensor], Tensor]] = {
    "dropout": lambda x: nn.functional.dropout(x.relu(), 0.5),
    "dropout of two readers": lambda x: nn.functional.dropout(x.relu(), 0.5) + x.relu(),
    "a ReLU of two readers": lambda x: nn.functional.dropout(y := x.relu(), 0.5) + y.sin(),
    "a choice": lambda x: x.relu() * (torch.arange(32) % 3 > 0) * 3.0,
    "a choice of elements": lambda x: x.relu() * (x.detach() > 0.3) * 3.0,
    "a factor for each": lambda x: x.relu() * (x.detach() > 0.3) * x.detach().exp(),
    "twice": lambda x: nn.functional.dropout(nn.functional.dropout(x.relu(), 0.5).relu(), 0.5),
    "its square": lambda x: nn.functional.dropout(x.relu(), 0.5).square(),
}


@pytest.mark.parametrize("name", MASKED)
def test_joint_masks_change_no_bit(name: str, decomposed: Any) -> None:
    def make() -> nn.Module:
        torch.manual_seed(0)
        return Masked(MASKED[name])

    stock, model = pair(make, decomposed, level="lossless", min_bytes=0)
    assert torch.equal(gradient(model, *inputs()), gradient(stock, *inputs()))


def test_a_joint_mask_leaves_the_forward_alone(decomposed: Any) -> None:
    """Where an infinite element that is dropped is NaN."""

    def make() -> nn.Module:
        torch.manual_seed(0)
        made = Masked(MASKED["dropout"])
        with torch.no_grad():
            made.first.bias[:2] = torch.tensor([torch.inf, torch.nan])
        return made

    outputs = []
    for model in pair(make, decomposed, level="lossless", min_bytes=0):
        torch.manual_seed(0)
        outputs.append(model(*inputs()).detach())
    torch.testing.assert_close(*outputs, rtol=0, atol=0, equal_nan=True)


class Norm(nn.Module):
    """A norm of columns of many scales."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(64)
        self.register_buffer("mix", torch.randn(32, 64) * torch.logspace(-1, 4, 64))

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        out: Tensor = self.norm(x @ self.mix)
        return out


def test_noise_is_relative_to_each_column_of_a_norm(decomposed: Any) -> None:
    torch.manual_seed(0)
    stock: Any = Norm()
    model: Any = torch.compile(copy.deepcopy(stock), backend=decomposed)
    gact_graph.wrap(model, bits=4, min_bytes=0)
    x = torch.randn(4096, 32)
    expected, own = (gradient(m, x, x)[:64] for m in (stock, model))
    assert 0 < (own - expected).norm() < 0.1 * expected.norm()


def test_groups_of_a_transposed_matrix_are_parts_of_rows(backend: Any) -> None:
    class Product(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(256, 256) / 16)

        def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
            return torch.addmm(x, x.sin() * scales, self.weight)

    scales = torch.logspace(-4, 4, 1024)[:, None]
    x = torch.randn(1024, 256)
    model: Any = torch.compile(Product(), backend=backend)
    gact_graph.wrap(model, bits=8, min_bytes=0)
    gradient(model, x, x)
    [row] = [row for row in gact_graph.report(model).contexts if row.codec == "quantize"]
    assert row.shape == (1024, 256)


def test_the_smallest_tensors_are_exact(backend: Any) -> None:
    class Pooled(Attention):
        """The last layer reads means over all places, 16 KB."""

        def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
            out: Tensor = self.last(self.encoder(x.view(160, -1, 32)).mean(1))
            return out

    model = gact_graph.wrap(torch.compile(Pooled(), backend=backend), bits=4, min_bytes=0)
    gradient(model, *inputs(8000))
    rows = gact_graph.report(model).contexts
    assert rows and all(row.shape != (160, 32) for row in rows)


def test_fewer_bits_store_less(decomposed: Any) -> None:
    stored = []
    for bits in (8, 2):
        model = gact_graph.wrap(torch.compile(gcn(), backend=decomposed), bits=bits, min_bytes=0)
        gradient(model, *inputs())
        rows = gact_graph.report(model).contexts
        stored.append(sum(row.stored_bytes for row in rows if row.codec == "quantize"))
    assert stored[1] < 0.6 * stored[0]


def test_a_graph_of_another_size(backend: Any) -> None:
    stock, model = pair(gcn, backend, bits=8, min_bytes=0)
    for nodes in (NODES, 1000, 1300):
        expected = gradient(stock, *inputs(nodes))
        assert (gradient(model, *inputs(nodes)) - expected).norm() < 0.05 * expected.norm()
        masks = [row for row in gact_graph.report(model).contexts if row.codec == "mask"]
        assert masks and all(row.shape[0] == nodes for row in masks)
    assert backend.frame_count == 2  # the second is for any size


def test_a_small_step_is_left_alone(backend: Any) -> None:
    stock, model = pair(gcn, backend)
    assert torch.equal(gradient(model, *inputs()), gradient(stock, *inputs()))
    assert {row.codec for row in gact_graph.report(model).contexts} == {"keep"}


def test_evaluation(backend: Any) -> None:
    _, model = pair(gcn, backend, min_bytes=0)
    gradient(model, *inputs())
    rows = gact_graph.report(model).contexts
    model.eval()
    with torch.no_grad():
        torch.testing.assert_close(model(*inputs()), model._orig_mod(*inputs()))
    assert gact_graph.report(model).contexts == rows


class Overflows(nn.Module):
    """Multiplies rows by a weight, of which some are infinite."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(32, 32), nn.Linear(32, 4)

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        h = self.first(x) * 2
        out: Tensor = self.last(torch.cat([h[:-1], h[-1:] * 1e38 * 1e38]))
        return out


def test_infinite_values_do_not_become_numbers(backend: Any) -> None:
    model = gact_graph.wrap(torch.compile(Overflows(), backend=backend), min_bytes=0)
    x, edges = inputs()
    model(x, edges)[:8].sum().backward()
    assert gact_graph.report(model).contexts
    gradient_of_last = model._orig_mod.last.weight.grad
    assert not gradient_of_last.isfinite().all()


def test_an_unwrapped_model_saves_exact_tensors(backend: Any) -> None:
    stock, model = pair(gcn, backend, bits=2, min_bytes=0)
    expected = gradient(stock, *inputs())
    assert not torch.equal(gradient(model, *inputs()), expected)
    gact_graph.unwrap(model)
    assert torch.equal(gradient(model, *inputs()), expected)


def test_a_model_that_breaks_into_graphs(backend: Any) -> None:
    """PyG's self-loops depend on data: graphs end there, and tensors between graphs are exact."""
    torch.manual_seed(0)
    made = GCN(32, 32, 3, 4, norm="batch_norm")
    stock = torch.compile(copy.deepcopy(made), backend="aot_eager")
    model = gact_graph.wrap(torch.compile(made, backend=backend), min_bytes=0)
    expected = gradient(stock, *inputs())
    assert (gradient(model, *inputs()) - expected).norm() < 0.2 * expected.norm()


def test_equal_slots_of_two_graphs_have_rows_and_noise_of_their_own() -> None:
    noise = Noise(0, 0, False)
    running, x = Running(Config(bits=4), noise), torch.randn(30, 20)
    names = ["tanh", "tanh#2"]
    with _running.entered(running):
        codes = [torch.ops.gact_graph_compiled.save_codes(x, 4, 256, False, "tanh") for _ in names]
    assert [*running.rows] == names
    assert [int(seed) for _, _, _, seed, *_ in codes] == [*map(noise.seed_of, names)]


def test_short_rows_get_sixteen_bits() -> None:
    """Shares of attention heads: at 4 bits their noise exceeded the gradient of a GAT 70 times."""
    running = Running(Config(bits=4), Noise(0, 0, False))
    for width, bits in ((4, 16), (15, 16), (16, 4), (64, 4)):
        x = torch.randn(100, width)
        graph = make_fx(lambda x, g: x * g)(x, x).graph
        assert running.bits_of(x, graph, "x_1") == bits


def test_operators_keep_the_promises_of_pytorch() -> None:
    x, index = torch.randn(30, 20), torch.arange(12).view(3, 4)
    operators = torch.ops.gact_graph_compiled
    checks = "test_schema", "test_faketensor"
    torch.library.opcheck(operators.save_bits.default, (x > 0, "slot"), test_utils=checks)
    for each in (index, index.t()):
        torch.library.opcheck(operators.save_index.default, (each, "slot"), test_utils=checks)
    for by_column in (False, True):
        encoding = x, 4, 256, by_column, "slot"
        torch.library.opcheck(operators.save_codes.default, encoding, test_utils=checks)
        decoding = (*operators.save_codes(*encoding), [30, 20], 4, 256, torch.float32)
        torch.library.opcheck(operators.load_codes.default, decoding, test_utils=checks)
        assert (operators.load_codes(*decoding) - x).abs().max() < 0.5


@pytest.mark.long
@MODELS
def test_inductor(make: Any) -> None:
    torch.compiler.reset()
    own = torch.compile(make(), fullgraph=True)
    model = gact_graph.wrap(own, bits=4, min_bytes=0, blocks=False)
    expected = torch.compile(make())
    torch._inductor.config.fallback_random = True
    try:
        right = gradient(expected, *inputs())
        error = (gradient(model, *inputs()) - right).norm() / right.norm()
    finally:
        torch._inductor.config.fallback_random = False
        torch.compiler.reset()
    assert 1e-4 < error < 0.25
    assert gact_graph.report(model).rate > 2.5  # with what the graphs keep exactly


_CACHED = """
import sys

import torch
from torch._dynamo.utils import counters
from torch_geometric.nn import GraphSAGE

import gact_graph

torch.manual_seed(0)
model = GraphSAGE(16, 32, 2, 4, norm="batch_norm")
x, edges = torch.randn(800, 16), torch.randint(800, (2, 3000))
if sys.argv[1] != "stock":
    gact_graph.wrap(model, level=sys.argv[1], min_bytes=0)
torch.compile(model)(x, edges).square().mean().backward()
gradient = torch.cat([p.grad.flatten() for p in model.parameters()])
stored = None if sys.argv[1] == "stock" else gact_graph.report(model).stored_bytes
print(counters["inductor"]["fxgraph_cache_hit"], gradient.norm().item(), stored)
"""


@pytest.mark.long
def test_caches_of_compiled_graphs_serve_the_level_that_made_them(tmp_path: Path) -> None:
    environment = os.environ | {"TORCHINDUCTOR_CACHE_DIR": str(tmp_path)}
    found: dict[str, list[list[str]]] = {}
    for level in ("L1", "stock", "lossless", "L1", "stock", "lossless"):
        words = run(_CACHED, level, environment=environment).split()
        found.setdefault(level, []).append(words)
    for (made, *first), (taken, *second) in found.values():
        assert made == "0" and int(taken) == 2  # forward and backward
        assert first == second
    (_, exact, _), (_, same, _) = found["stock"][0], found["lossless"][0]
    assert float(exact) == pytest.approx(float(same), rel=1e-5)
    assert found["L1"][0] != found["lossless"][0]


class History(nn.Module):
    """Gathers from a buffer that forward overwrites, as historical embeddings do."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.lin = nn.Linear(width, 4)
        self.register_buffer("history", torch.ones(NODES, width))

    def forward(self, x: Tensor, edges: Tensor) -> Tensor:
        out = x.new_zeros(NODES, 4).index_add(0, edges[1], self.lin(self.history[edges[0]]))
        with torch.no_grad():
            self.history.copy_(x)
        return out


def test_a_buffer_that_forward_overwrites(backend: Any) -> None:
    torch.manual_seed(0)
    stock, model = pair(History, backend, level="lossless", min_bytes=0)
    model.load_state_dict(stock.state_dict())
    for _ in range(2):
        assert torch.equal(gradient(model, *inputs()), gradient(stock, *inputs()))


class BetweenGraphs(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(32, 32), nn.Linear(32, 4)

    def forward(self, x: Tensor, edges: Tensor) -> Tensor:
        out: Tensor = self.last(self.between(self.first(x)))
        return out

    @torch.compiler.disable
    def between(self, h: Tensor) -> Tensor:
        y = h.exp()
        result = y * 1
        y.mul_(2)
        return result


def test_a_tensor_between_graphs_that_changes_is_an_error(backend: Any) -> None:
    for model in pair(BetweenGraphs, backend, level="lossless", min_bytes=0):
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            gradient(model, *inputs())
