"""Estimates: the memory of a step under each strategy."""

import copy

import pytest
import torch
from old_pyg import needs_to_hetero
from torch import nn
from torch_geometric.nn import GAT, GCNConv, to_hetero

import gact_graph
from gact_graph.api.report.names import parse_bytes

NODES, EDGES = 12_000, 60_000


def graph(nodes=NODES, edges=EDGES):
    torch.manual_seed(0)
    return torch.randn(nodes, 32), torch.randint(nodes, (2, edges))


def gat():
    torch.manual_seed(0)
    return GAT(32, 32, num_layers=2, out_channels=5, heads=2, norm="batch_norm", dropout=0.5)


@pytest.fixture(scope="module")
def estimated():
    gact_graph.estimate(gat(), *graph(200, 800))  # loads libraries, which would count otherwise
    return gact_graph.estimate(gat(), *graph(), memory="30 MiB")


def test_it_tells_every_way_the_least_lossy_first(estimated):
    rows = estimated.rows
    assert [row.strategy for row in rows[:3]] == ["stock", "lossless", "lossless + blocks"]
    assert [row.bits for row in rows[3:]] == sorted((row.bits for row in rows[3:]), reverse=True)
    assert {row.bits for row in rows} == {32, *range(2, 9)}
    assert all(row.peak_bytes > 0 for row in rows)


def test_messages_take_most_and_blocks_make_none(estimated):
    peak = {row.strategy: row.peak_bytes for row in estimated.rows}
    messages = (EDGES + NODES) * 32 * 4
    assert 3 * messages < peak["stock"] < 20 * messages
    assert peak["lossless + blocks"] < peak["stock"] / 1.5


def test_what_is_saved_is_what_the_report_says(estimated):
    model = gact_graph.wrap(gat(), level="lossless", min_bytes=0)
    model(*graph()).sum().backward()
    report = gact_graph.report(model)
    rows = {row.strategy: row for row in estimated.rows}
    assert rows["stock"].saved_bytes == pytest.approx(report.raw_bytes, rel=0.05)
    assert rows["lossless"].saved_bytes == pytest.approx(report.stored_bytes, rel=0.05)


def test_what_fits_is_told_and_printed(estimated):
    budget = 30 << 20
    for row in estimated.rows:
        assert row.fits is False or row.peak_bytes < budget
        assert row.fits is True or row.peak_bytes > 0.8 * budget
    assert "yes" in str(estimated) and "30.0 MiB" in str(estimated)
    found = estimated.to_dict()
    assert (found["nodes"], found["edges"], found["memory"]) == (NODES, EDGES, budget)
    assert found["strategies"][0]["strategy"] == "stock" and len(found["strategies"]) == len(
        estimated.rows
    )


def test_no_trace_is_left():
    model, inputs = gat(), graph()
    model(*inputs).sum().backward()
    before = copy.deepcopy(model.state_dict()), [p.grad.clone() for p in model.parameters()]
    state = torch.get_rng_state()
    gact_graph.estimate(model.eval(), *inputs)
    assert torch.equal(torch.get_rng_state(), state) and not model.training
    assert all(torch.equal(before[0][name], t) for name, t in model.state_dict().items())
    assert all(map(torch.equal, before[1], (p.grad for p in model.parameters())))
    gact_graph.unwrap(gact_graph.wrap(model, min_bytes=0))  # it was not left wrapped


def test_a_graph_that_does_not_exist_yet(estimated):
    found = gact_graph.estimate(gat(), *graph(2000, 10_000), nodes=NODES, edges=EDGES)
    assert (found.size.nodes, found.size.edges) == (NODES, EDGES)
    assert found.rows[0].saved_bytes == pytest.approx(estimated.rows[0].saved_bytes, rel=0.05)


def test_layers_that_cache_and_models_that_are_wrapped():
    class Cached(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv = GCNConv(32, 16, cached=True)

        def forward(self, x, edge_index):
            return self.conv(x, edge_index)

    model, inputs = gact_graph.wrap(Cached(), min_bytes=0), graph()
    model(*inputs).sum().backward()
    cached = model.conv._cached_edge_index
    assert gact_graph.estimate(model, *inputs).rows
    assert model.conv._cached_edge_index is cached
    gact_graph.unwrap(model)  # it is still wrapped


def test_lazy_and_heterogeneous_models():
    needs_to_hetero()
    x, edges = graph()
    metadata = (["a", "b"], [("a", "to", "b"), ("b", "to", "a")])
    model = to_hetero(GAT((-1, -1), 16, num_layers=2, add_self_loops=False), metadata)
    inputs = {"a": x, "b": x}, dict.fromkeys(metadata[1], edges)
    found = gact_graph.estimate(model, *inputs)
    assert found.size.nodes == 2 * NODES and found.size.edges == 2 * EDGES
    assert any(nn.parameter.is_lazy(p) for p in model.parameters())


@pytest.mark.parametrize(
    ("memory", "found"),
    [
        ("8 GB", 8 * 10**9),
        ("1.5GiB", 3 << 29),
        ("512 kb", 512_000),
        (1000, 1000),
        (8e9, 8 * 10**9),
        (1e9 / 3, 333_333_333),
        ("7 B", 7),
    ],
)
def test_amounts_of_memory(memory, found):
    assert parse_bytes(memory) == found


NO_AMOUNTS = [
    *("8", "GB", "-1 GB", "8 QB", "", 9 * "9999999999" + " GB"),
    *(0, 0.5, 10**400, float("inf"), float("nan")),
]


@pytest.mark.parametrize("memory", NO_AMOUNTS, ids=range(len(NO_AMOUNTS)))
def test_what_is_no_amount_of_memory(memory):
    with pytest.raises(ValueError, match="Expected memory as a number of bytes or a text"):
        gact_graph.estimate(gat(), *graph(), memory=memory)


@pytest.mark.parametrize("memory", [True, ["8 GB"]])
def test_memory_is_a_number_or_a_text(memory):
    with pytest.raises(TypeError, match="Expected memory to be a number of bytes or a text"):
        gact_graph.wrap(gat(), memory=memory)


def test_inputs_without_a_graph():
    with pytest.raises(ValueError, match="Expected inputs that contain a graph"):
        gact_graph.estimate(nn.Linear(3, 3), torch.randn(5, 3))
