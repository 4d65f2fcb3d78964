"""Which strategies are tried, on how much of the graph, and that trials leave no trace."""

from __future__ import annotations

import gc
import threading
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from grids import grid
from ranks import run_ranks
from torch import Tensor, nn
from torch_geometric.nn import GAT, GCN, GCNConv, GraphSAGE

import gact_graph
from gact_graph.api.budget import trials
from gact_graph.api.budget.estimate import LOSSLESS, STOCK, Strategy
from gact_graph.api.budget.steps import Trial
from gact_graph.api.budget.trials import Search, estimate_call
from gact_graph.api.report.contexts import Contexts
from gact_graph.capture.config import Config
from gact_graph.codecs.offload.speed import seconds_of_byte
from gact_graph.support.rows import Row

MB = 10**6
UNIFORM = {
    "stock": 100,
    "lossless": 80,
    "lossless + blocks + kept results": 65,
    "lossless + blocks": 60,
    "L1, 2 bits": 40,
    "CB2, 2 bits": 30,
    "L2, 2 bits": 35,
}
PEAKS = UNIFORM | {"CB2": 70, "L2": 75}


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
    """The strategies of all trials: the whole takes :data:`PEAKS` MB; 4 M elements have codes."""
    names: list[str] = []

    def run(self: Search, strategy: Strategy, share: float, config: Config) -> Trial:
        names.append(strategy.name)
        peak, coded = round(share * PEAKS[strategy.name] * MB), round(share * 4 * MB)
        codes = Row("codes", "node", "quantize", (), coded, 2, peak, peak // 2)
        kept = Row("kept", "node", "keep", (), coded, None, peak, peak // 2)
        return Trial(
            share, 0, peak, Contexts([codes if strategy.bits < 32 else kept]), seconds=share
        )

    monkeypatch.setattr(Search, "_trial", run)
    monkeypatch.setattr(trials, "resident_bytes", lambda: 0)
    return names


FAST = "lossless + blocks + kept results"
EXACT = {"stock", FAST, "lossless + blocks"}


@pytest.mark.parametrize(
    ("memory", "prefer", "expected", "strategy"),
    [
        (110, "time", {"stock", FAST}, FAST),
        (73, "time", {"stock", FAST}, FAST),
        (110, "accuracy", {"stock"}, "stock"),
        (95, "accuracy", {"stock", "lossless"}, "lossless"),
        (70, "time", EXACT, "lossless + blocks"),
        (70, "accuracy", {*EXACT, "lossless"}, "lossless + blocks"),
        (49, "time", {*EXACT, "L1, 2 bits"}, "L1, 8 bits"),
        (47, "time", {*EXACT, "L1, 2 bits"}, "L1, 4 bits"),
        (40, "accuracy", {*PEAKS}, "CB2, 8 bits"),
    ],
)
def test_a_budget_tries_no_more_than_it_takes_to_choose(
    tried: list[str], memory: int, prefer: str, expected: set[str], strategy: str
) -> None:
    model = gact_graph.wrap(Net(), memory=memory * MB, prefer=prefer)
    model(*graph())
    assert {*tried} == expected
    assert gact_graph.report(model).strategy == strategy


@pytest.mark.parametrize(
    ("memory", "expected"),
    [
        (30, ["stock", FAST, "lossless + blocks", "L1, 2 bits", "L2, 2 bits", "CB2, 2 bits"]),
        (18, ["stock", "lossless + blocks", "L1, 2 bits", "L2, 2 bits", "CB2, 2 bits"]),
    ],
)
def test_a_far_too_small_budget_is_refused_by_the_smallest_strategies_alone(
    tried: list[str], memory: int, expected: list[str]
) -> None:
    model = gact_graph.wrap(Net(), memory=memory * MB)
    with pytest.raises(gact_graph.MemoryBudgetError, match="the smallest, CB2, 2 bits, takes"):
        model(*graph())
    assert [*dict.fromkeys(tried)] == expected


def test_a_far_too_small_budget_that_the_smallest_fit_still_takes_the_least_lossy(
    tried: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(PEAKS, "stock", 1000)
    model = gact_graph.wrap(Net(), memory=70 * MB)
    model(*graph())
    assert gact_graph.report(model).strategy == "lossless + blocks"


class Steps(nn.Module):
    """Counts its forwards."""

    count = 0

    def __init__(self) -> None:
        super().__init__()
        self.layers = GCN(64, 64, 3)

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        Steps.count += 1
        out: Tensor = self.layers(x, edge_index)
        return out


def test_a_refusal_takes_few_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Steps, "count", 0)
    model = gact_graph.wrap(Steps(), memory="20 MiB")
    inputs = torch.randn(100_000, 64), torch.randint(100_000, (2, 800_000))
    with pytest.raises(gact_graph.MemoryBudgetError):
        model(*inputs)
    assert Steps.count <= 15  # three with stock, and three with each of the smallest strategies


class Basis(nn.Module):
    """Makes a weight of 16 MB from a few parameters, whatever the size of the graph."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = nn.Parameter(torch.randn(2000, 1)), nn.Parameter(torch.randn(2000))
        self.conv = GCNConv(16, 8)

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        out: Tensor = self.conv(x, edge_index) + (self.left * self.right).tanh().mean()
        return out


def test_memory_that_does_not_grow_with_the_graph_refuses_no_budget() -> None:
    model = gact_graph.wrap(Basis(), memory="600 MB", prefer="accuracy")
    model(torch.randn(50_000, 16), torch.randint(50_000, (2, 200_000)))
    assert gact_graph.report(model).strategy == "stock"


class Caching(Net):
    """Keeps a tensor of its first graph."""

    scale: Tensor | None = None

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        if self.scale is None:
            self.scale = x.new_ones(len(x), 1)
        return super().forward(x * self.scale, edge_index)


def test_each_part_meets_the_model_as_it_was() -> None:
    model = Caching()
    assert gact_graph.estimate(model, *graph()).rows
    assert model.scale is None


def test_a_table_has_every_strategy_and_is_not_ruled_by_a_budget(tried: list[str]) -> None:
    found = gact_graph.estimate(Net(), *graph(), memory=110 * MB)
    assert {*tried} == {*UNIFORM} - {FAST}
    assert {row.bits for row in found.rows} == {32, *range(2, 9)}
    assert found.rows[0].saved_bytes == 50 * MB


def test_a_strategy_that_was_taken_is_tried_first_whatever_else_fits(tried: list[str]) -> None:
    model = gact_graph.wrap(Net(), memory=49 * MB)
    model(*graph())
    state = gact_graph.state_dict(model)
    tried.clear()
    other = gact_graph.wrap(Net(), memory=200 * MB)
    gact_graph.load_state_dict(other, state)
    other(*graph())
    assert gact_graph.report(other).strategy == "L1, 8 bits" and {*tried} == {"stock", "L1, 2 bits"}


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
    gc.unfreeze()
    try:
        gact_graph.estimate(Net(), *graph())
        assert not gc.get_freeze_count()
    finally:
        gc.freeze()
    count = gc.get_freeze_count()
    gact_graph.estimate(Net(), *graph())
    assert 0 < gc.get_freeze_count() <= count


class Counted(Net):
    def forward(self, x: Tensor, edge_index: Tensor, count: int) -> Tensor:
        return super().forward(x, edge_index)[torch.arange(count)]


def test_a_model_that_takes_no_smaller_graph() -> None:
    model = gact_graph.wrap(Counted(), memory="8 GB")
    with pytest.raises(
        ValueError, match=r"for memory= \(got a graph of .* used: IndexError: .*pass bits"
    ):
        model(*graph(), 300)


def one(kind: type[nn.Module], channels: int) -> nn.Module:
    return kind(channels, 32, 3, 5, norm="batch_norm", dropout=0.5)


def whole(model: nn.Module, inputs: Any, strategy: Strategy) -> int:
    """What a trial on the whole graph takes."""
    return (
        Search(model, "forward", (inputs, {}), Config(), None, None, None)._run(strategy, 1.0).peak
    )


# PyTorch warns of these once a process, so it depends on the tests that ran before.
@pytest.mark.filterwarnings("ignore:Sparse (invariant|CS[CR]) .*:UserWarning")
@pytest.mark.parametrize(
    ("kind", "features"), grid([GCN, GraphSAGE, GAT], ["narrow", "wide", "sparse"])
)
def test_parts_of_the_graph_say_what_the_whole_takes(kind: type[nn.Module], features: str) -> None:
    """By what torch's allocator hands out, so the same at every run.

    The gradient of a weight for wide features hides what the graph takes, in small parts.
    """
    if features == "sparse" and kind is not GCN:
        pytest.skip("PyG's other layers take no sparse features")
    channels = 32 if features == "narrow" else 1000
    x = torch.rand(3000, channels).ge(0.99).float()
    inputs = x.to_sparse_csr() if features == "sparse" else x, torch.randint(3000, (2, 20_000))
    model = one(kind, channels)
    found = estimate_call(model, "forward", (inputs, {}), Config(), None)
    for strategy in (STOCK, LOSSLESS, Strategy("lossless"), Strategy("L1", 2)):
        peak = found.peak_of(strategy) - found.standing
        real = whole(model, inputs, strategy)
        assert peak == pytest.approx(real, rel=0.05, abs=1 * MB), strategy


def test_more_bits_take_what_their_codes_take() -> None:
    inputs = torch.randn(3000, 32), torch.randint(3000, (2, 20_000))
    model = one(GAT, 32)
    found = estimate_call(model, "forward", (inputs, {}), Config(), None)
    for bits in (4, 8):
        peak = found.peak_of(Strategy("L1", bits)) - found.standing
        assert peak == pytest.approx(
            whole(model, inputs, Strategy("L1", bits)), rel=0.05, abs=0.5 * MB
        )


@pytest.mark.parametrize("memory", [60 * MB, 30 * MB])
def test_no_trial_takes_more_than_half_of_the_budget(
    memory: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With their inputs, whichever strategy they try, but for what steps differ by."""
    found: list[Trial] = []
    run = Search._trial

    def noted(self: Search, strategy: Strategy, share: float, config: Config) -> Trial:
        found.append(run(self, strategy, share, config))
        return found[-1]

    monkeypatch.setattr(Search, "_trial", noted)
    inputs = torch.rand(4000, 1000), torch.randint(4000, (2, 50_000))
    wide = one(GAT, 1000)
    estimate_call(wide, "forward", (inputs, {}), Config(), memory)
    weights = sum(p.nbytes for p in wide.parameters())
    assert max(trial.held + trial.peak for trial in found) <= 1.03 * memory / 2 + weights


def test_a_strategy_that_cannot_be_told_counts_with_the_most_it_may_take(tried: list[str]) -> None:
    """Its parts end where they reach half of the budget."""
    search = Search(Net(), "forward", (graph(), {}), Config(), 2 * MB, prefer="time")
    assert search.choose() is None
    assert search.estimate().smallest()[0].level == "CB2"


def test_no_part_is_tried_twice_with_a_strategy(monkeypatch: pytest.MonkeyPatch) -> None:
    """A budget that leaves room for the first part alone has no other part to try."""
    tried: list[tuple[Strategy, float, bool]] = []
    run = Search._trial

    def noted(self: Search, strategy: Strategy, share: float, config: Config) -> Trial:
        tried.append((strategy, share, config.adaptive))
        return run(self, strategy, share, config)

    monkeypatch.setattr(Search, "_trial", noted)
    model = GCNConv(16, 16)
    inputs = (torch.randn(20_000, 16), torch.randint(20_000, (2, 100_000)))
    Search(model, "forward", (inputs, {}), Config(), 100_000, prefer="time").choose()
    assert len(tried) >= 3  # stock and two levels
    assert len(set(tried)) == len(tried)


def test_a_model_that_cannot_be_copied() -> None:
    model = Net()
    model.lock = threading.Lock()
    with pytest.raises(ValueError, match=r"Expected a model that copy.deepcopy can copy.*lock"):
        gact_graph.estimate(model, *graph())


def test_a_folder_that_cannot_be_written_rules_out_files_alone(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    names = {row.strategy for row in gact_graph.estimate(Net(), *graph()).rows}
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "missing"))
    assert seconds_of_byte(torch.device("cpu"), 1.0) is None
    left = {row.strategy for row in gact_graph.estimate(Net(), *graph()).rows}
    assert left < names and all(name.startswith("L2") for name in names - left)


def test_kernels_are_loaded_where_their_warning_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    def loads(device: torch.device) -> bool:
        warnings.warn("no kernels", RuntimeWarning, stacklevel=1)
        return False

    monkeypatch.setattr(trials, "makes_messages", loads)
    with pytest.warns(RuntimeWarning, match="no kernels"):
        gact_graph.estimate(Net(), *graph())


_ON_TWO_RANKS = """
from torch.nn.parallel import DistributedDataParallel
from torch_geometric.nn import GCN

def net():
    torch.manual_seed(7)
    return GCN(64, 128, 8, 8, norm="batch_norm")

# Another graph on each rank, so that each takes another number of trials.
torch.manual_seed(rank)
nodes, count = ((1_000, 4_000), (20_000, 100_000))[rank]
x, edges = torch.randn(nodes, 64), torch.randint(nodes, (2, count))

def gradients(model):
    model(x, edges).square().mean().backward()
    return torch.cat([p.grad.flatten() for p in model.parameters()])

stock = gradients(DistributedDataParallel(net()))
around = gact_graph.wrap(DistributedDataParallel(net()), memory="300 MB")
inside = DistributedDataParallel(gact_graph.wrap(net(), memory="300 MB"))
for found in (gradients(around), gradients(inside)):
    assert (found - stock).norm() < 0.1 * stock.norm(), (found - stock).norm() / stock.norm()

def widths(inside):
    model = gact_graph.wrap(net(), memory=MEMORY)
    (DistributedDataParallel(model) if inside else model)(x, edges).sum().backward()
    return len(model.forward.budget.strategy.widths)

peaks = {row.strategy: row.peak_bytes for row in gact_graph.estimate(net(), x, edges).rows}
MEMORY = "300 MB"
if rank == 1:
    MEMORY = int(0.7 * peaks["L1, 2 bits"] + 0.3 * peaks["lossless + blocks"])
    assert widths(inside=False) > 0
dist.barrier()
found = widths(inside=True)
assert rank == 0 or found > 0
"""


@pytest.mark.long
def test_trials_of_a_rank_concern_no_other(tmp_path: Path) -> None:
    run_ranks(_ON_TWO_RANKS, tmp_path)
