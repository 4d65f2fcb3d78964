"""Which ways are tried, and that trials leave no trace outside the model either."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch_geometric.nn import GAT, GCN, GCNConv, TransformerConv

import gact_graph
from gact_graph.api.budget import trying
from gact_graph.api.budget.trial import Subject, Trial
from gact_graph.api.budget.trying import estimate_call
from gact_graph.api.budget.ways import STOCK, Way
from gact_graph.capture.config import Config

MB = 10**6
EXACT_PEAKS = {"stock": 100 * MB, "lossless": 80 * MB, "lossless + blocks": 60 * MB}
CODED = {"L1, 8 bits", "L1, 2 bits", "CB2, 8 bits", "CB2, 2 bits"}


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = GCNConv(16, 8)

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        out: Tensor = self.conv(x, edge_index)
        return out


def graph() -> tuple[Tensor, Tensor]:
    return torch.randn(300, 16), torch.randint(300, (2, 2000))


@pytest.fixture
def tried(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The ways of all trials, which take what is known on any share of the graph."""
    names: list[str] = []

    def run(self: Subject, way: Way, inputs: tuple[Any, Any], blocks: float) -> Trial:
        names.append(way.name)
        return Trial((EXACT_PEAKS.get(way.name, 40 * MB),), MB, MB, 1.0)

    monkeypatch.setattr(Subject, "run", run)
    return names


@pytest.mark.parametrize(
    ("memory", "expected"),
    [
        (200 * MB, {"stock"}),
        (90 * MB, {"stock", "lossless"}),
        (70 * MB, {*EXACT_PEAKS}),
        (50 * MB, {*EXACT_PEAKS} | CODED),
    ],
)
def test_a_budget_tries_nothing_lossier_than_an_exact_way_that_fits(
    tried: list[str], memory: int, expected: set[str]
) -> None:
    model = gact_graph.wrap(Net(), memory=memory)
    model(*graph())
    assert {*tried} == expected
    fitting = [name for name, peak in EXACT_PEAKS.items() if peak < memory]
    assert gact_graph.report(model).way == (fitting[0] if fitting else "L1, 8 bits")


def test_a_table_has_every_way(tried: list[str]) -> None:
    found = gact_graph.estimate(Net(), *graph(), memory=200 * MB)
    assert {*tried} == {*EXACT_PEAKS} | CODED
    assert {row.bits for row in found.rows} == {32, *range(2, 9)}


def test_a_way_that_was_taken_is_estimated_whatever_else_fits(tried: list[str]) -> None:
    model = gact_graph.wrap(Net(), memory=50 * MB)
    model(*graph())
    state = gact_graph.state_dict(model)
    tried.clear()
    other = gact_graph.wrap(Net(), memory=200 * MB)
    gact_graph.load_state_dict(other, state)
    other(*graph())
    assert gact_graph.report(other).way == "L1, 8 bits" and {*tried} > CODED


def test_two_bits_need_no_probes_where_eight_fit(tried: list[str]) -> None:
    estimate_call(Net(), "forward", (graph(), {}), Config(), 50 * MB)
    assert tried.count("L1, 8 bits") == 3 and tried.count("L1, 2 bits") == 1


@pytest.mark.parametrize("memory", [None, "8 GB"])
def test_what_made_the_inputs_keeps_its_graph_and_its_gradients(memory: str | None) -> None:
    first, (x, edges) = nn.Linear(16, 16), graph()
    leaf = torch.zeros(16, requires_grad=True)
    h = torch.tanh(first(x) + leaf)
    if memory is None:
        gact_graph.estimate(Net(), h, edges)
        out = Net()(h, edges)
    else:
        out = gact_graph.wrap(Net(), memory=memory)(h, edges)
    assert all(p.grad is None for p in (*first.parameters(), leaf))
    out.sum().backward()
    assert all(p.grad is not None for p in (*first.parameters(), leaf))


def test_objects_that_are_frozen_stay_so(tried: list[str]) -> None:
    gact_graph.estimate(Net(), *graph())
    assert not gc.get_freeze_count()
    gc.freeze()
    try:
        count = gc.get_freeze_count()
        gact_graph.estimate(Net(), *graph())
        assert 0 < gc.get_freeze_count() <= count
    finally:
        gc.unfreeze()


class Counted(Net):
    def forward(self, x: Tensor, edge_index: Tensor, count: int) -> Tensor:
        return super().forward(x, edge_index)[torch.arange(count)]


def test_a_model_that_takes_no_smaller_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trying, "_EDGES", 1000)
    monkeypatch.setattr(trying, "_NODES", 100)
    model = gact_graph.wrap(Counted(), memory="8 GB")
    with pytest.raises(
        ValueError, match=r"for memory= \(got some of .* do: IndexError: .*give bits"
    ):
        model(*graph(), 300)


@pytest.mark.parametrize("kind", [GCN, GAT])
def test_a_part_of_the_graph_tells_what_the_whole_takes(
    kind: type[nn.Module], monkeypatch: pytest.MonkeyPatch
) -> None:
    """By what torch's allocator hands out; that is compared, so the same at every run."""
    monkeypatch.setattr(trying, "_EDGES", 30_000)
    inputs = torch.randn(12_000, 32), torch.randint(12_000, (2, 120_000))
    model = kind(32, 32, 3, 5, norm="batch_norm", dropout=0.5)
    found = estimate_call(model, "forward", (inputs, {}), Config(), None)
    whole = Subject(model, "forward", Config())
    off = {}
    for way in (STOCK, Way("lossless"), Way("L1", 2)):
        measured = whole.run(way, (inputs, {})).peak_bytes
        off[way.name] = found.peak_of(way) / measured - 1
    assert all(abs(value) < 0.25 for value in off.values()), off


class OfEdges(nn.Module):
    """Its messages take most of the memory."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = TransformerConv(16, 64, 2, edge_dim=8)

    def forward(self, x: Tensor, edge_index: Tensor, edge_attr: Tensor) -> Tensor:
        out: Tensor = self.conv(x, edge_index, edge_attr)
        return out


def test_a_budget_far_too_small_names_the_same_peaks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Trials then run on small parts, of which one block of the usual size would be the whole."""
    monkeypatch.setattr(trying, "_tried", lambda device_type: [STOCK, Way("lossless")])
    inputs = torch.randn(300, 16), torch.randint(300, (2, 60_000)), torch.rand(60_000, 8)
    call = OfEdges(), "forward", (inputs, {}), Config()
    free, small = (estimate_call(*call, memory) for memory in (None, 4 * MB))
    for way in (STOCK, Way("lossless")):
        assert small.peak_of(way) == pytest.approx(free.peak_of(way), rel=0.1)
