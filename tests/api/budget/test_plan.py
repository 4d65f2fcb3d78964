"""Plans: their numbers, their files, and models that follow them."""

from __future__ import annotations

import contextlib
import itertools
import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from fresh import run
from torch import Tensor, nn
from torch_geometric.nn import GAT, GCN, GCNConv, GraphSAGE

import gact_graph
from gact_graph.api.budget import mixed as mixed_strategies
from gact_graph.api.budget import steps, trials
from gact_graph.api.budget.estimate import BLOCKS
from gact_graph.api.budget.mixed import seconds_of_element
from gact_graph.api.budget.steps import TrainedCopy, undisturbed, watching
from gact_graph.api.budget.trials import Search
from gact_graph.api.install import patch_of
from gact_graph.capture.config import Config
from gact_graph.capture.places import Places
from gact_graph.ops import allocator

NODES, EDGES = 30_000, 200_000
MB = 10**6
CPU = torch.device("cpu")

pytestmark = pytest.mark.skipif(allocator.load() is None, reason="nothing watches allocations")


def graph(nodes: int = NODES, edges: int = EDGES) -> tuple[Tensor, Tensor]:
    torch.manual_seed(0)
    return torch.randn(nodes, 64), torch.randint(nodes, (2, edges))


def net(kind: Any = GCN, **options: Any) -> nn.Module:
    torch.manual_seed(0)
    made: nn.Module = kind(64, 64, 3, 8, norm="batch_norm", dropout=0.5, **options)
    return made


@pytest.fixture(scope="module", autouse=True)
def libraries() -> None:
    """Plans count libraries that the process loads meanwhile: here they are loaded before."""
    model = net()
    low, high = range_of(model)
    for memory in range(low, high, (high - low) // 8):
        with contextlib.suppress(gact_graph.MemoryBudgetError):
            gact_graph.plan(model, *graph(), memory=memory)


@pytest.fixture(autouse=True)
def steady_times(monkeypatch: pytest.MonkeyPatch) -> None:
    """Choices depend on how fast the machine is: here, trials' steps take 2 s, without a disk."""
    clock = itertools.count()
    monkeypatch.setattr(steps, "seconds_on", lambda device: float(next(clock)))
    for module in (mixed_strategies, trials):
        monkeypatch.setattr(module, "seconds_of_byte", lambda device, nbytes: None)


def range_of(model: nn.Module) -> tuple[int, int]:
    """The least budget that a plan keeps, and one that keeps all tensors exactly."""
    with pytest.raises(gact_graph.MemoryBudgetError) as refused:
        gact_graph.plan(model, *graph(), memory=1 * MB)
    assert "needs a budget of" in str(refused.value)
    found = gact_graph.estimate(model, *graph())
    peaks = {row.strategy: row.peak_bytes for row in found.rows}
    return round(0.8 * peaks["L1, 2 bits"]), round(1.1 * peaks["lossless + blocks"]) + 5 * MB


def test_more_memory_never_means_a_slower_and_less_accurate_plan() -> None:
    model = net()
    low, high = range_of(model)
    plans: list[gact_graph.Plan] = []
    # Codes are planned in the lower third.
    for memory in [*range(low, low + (high - low) // 3, (high - low) // 36), high]:
        try:
            plan = gact_graph.plan(model, *graph(), memory=memory)
        except gact_graph.MemoryBudgetError:
            assert not plans  # refused below all that are kept
            continue
        assert plan.peak_bytes <= memory
        plans.append(plan)
    assert len({plan.error for plan in plans}) >= 2 and plans[-1].error == 0
    for less, more in itertools.pairwise(plans):
        seconds = [sum(tensor.seconds for tensor in plan.tensors) for plan in (less, more)]
        is_better = more.error <= less.error * (1 + 1e-6) or seconds[1] <= seconds[0] * (1 + 1e-6)
        assert is_better or less.strategy.level != more.strategy.level


def mixed(model: nn.Module) -> gact_graph.Plan:
    """A plan that keeps some tensors exactly and others in codes."""
    low, high = range_of(model)
    for step in range(1, 8):
        memory = low + (high - low) * step // 8
        try:
            plan = gact_graph.plan(model, *graph(), memory=memory)
        except gact_graph.MemoryBudgetError:
            continue
        widths = [width for _, width in plan.strategy.widths]
        if 32 in widths and min(widths) < 32:
            return plan
    raise AssertionError("no plan is mixed")


@pytest.mark.parametrize(("kind", "options"), [(GCN, {}), (GAT, {"heads": 2}), (GraphSAGE, {})])
def test_a_mixed_plan_takes_what_it_says(kind: Any, options: dict[str, Any]) -> None:
    model = net(kind, **options)
    plan = mixed(model)
    with undisturbed(CPU):
        search = Search(model, "forward", (graph(), {}), Config(), plan.memory, prefer="time")
        peak = search._run(plan.strategy, 1.0).peak
    assert max(peak.line.at(1.0) for peak in plan.peaks) == pytest.approx(peak, rel=0.08)


def test_a_trial_records_what_exact_tensors_are_computed_from() -> None:
    trial = TrainedCopy(net(), "forward", BLOCKS, Config()).train((graph(), {}), 1.0)
    sources = trial.steps[-1].sources
    assert "norms.0/module/batch_norm.input" in sources["convs.1/lin/linear.input"]
    assert sources["norms.0/module/batch_norm.input"] == []


def test_planning_draws_no_random_numbers() -> None:
    seconds_of_element.cache_clear()
    model, inputs = net(), graph()
    before = torch.get_rng_state()
    gact_graph.plan(model, *inputs, memory="1 GB")
    assert torch.equal(torch.get_rng_state(), before)


def test_a_wrapped_model_follows_its_plan() -> None:
    plan = mixed(net())
    model = gact_graph.wrap(net(), plan=plan)
    x, edges = graph()
    with watching(CPU) as watch:
        for _ in range(2):
            model.zero_grad()
            model(x, edges).square().mean().backward()
        assert watch.peak() <= plan.memory
    report = gact_graph.report(model)
    assert report.strategy == plan.strategy.name
    assert report.planned_bytes == plan.peak_bytes and "planned" in str(report)
    widths = dict(plan.strategy.widths)
    for row in report.contexts:
        if widths.get(row.slot) == 32:
            assert row.bits is None, row
        elif row.slot in widths and not plan.strategy.measures:
            assert row.bits == widths[row.slot], row


def test_tensors_off_the_device_are_those_of_the_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mixed_strategies, "seconds_of_byte", lambda device, nbytes: 1e-12)
    stock, (x, edges) = net(GAT, heads=2), graph()
    plan = gact_graph.plan(stock, x, edges, memory="1 GB")
    while not plan.strategy.offloaded:
        plan = gact_graph.plan(stock, x, edges, memory=plan.peak_bytes + 5 * MB)
    away = {*plan.strategy.offloaded}
    assert away and plan.error == 0  # of a fast disk, codes would only add noise
    assert any(tensor.choice == "exact, offloaded" for tensor in plan.tensors)
    model = gact_graph.wrap(net(GAT, heads=2), plan=gact_graph.Plan.from_dict(plan.to_dict()))
    with watching(CPU) as watch:
        for _ in range(2):
            model.zero_grad()
            model(x, edges).square().mean().backward()
        assert watch.peak() <= plan.memory
    rows = gact_graph.report(model).contexts
    assert {row.slot for row in rows if row.host_bytes} <= away
    assert all(row.host_bytes for row in rows if row.slot in away and row.stored_bytes >= 1 << 20)
    in_blocks = gact_graph.wrap(net(GAT, heads=2), level="lossless", blocks=True, min_bytes=0)
    for trained in (model, in_blocks):
        torch.manual_seed(0)
        trained.zero_grad()
        trained(x, edges).square().mean().backward()
    for ours, theirs in zip(model.parameters(), in_blocks.parameters(), strict=True):
        torch.testing.assert_close(ours.grad, theirs.grad)


def test_without_a_disk_nothing_is_offloaded() -> None:
    assert not mixed(net()).strategy.offloaded


def peak_of_first_step(plan: gact_graph.Plan) -> int:
    model, inputs = gact_graph.wrap(net(), plan=plan), graph()
    with watching(CPU) as watch:
        model(*inputs).square().mean().backward()
        return watch.peak()


def test_the_first_step_shares_memory_as_all_others_do() -> None:
    plan = mixed(net())
    assert plan.places.proven == {f"convs.{layer}/propagate" for layer in range(3)}
    without = replace(plan, places=Places())
    assert peak_of_first_step(plan) < peak_of_first_step(without) - 2 * MB


class ReadsSumsTwice(nn.Module):
    """Adds to a sum of neighbors, whose values it reads again."""

    def __init__(self) -> None:
        super().__init__()
        self.net, self.conv = net(), GCNConv(8, 8, bias=False)

    def forward(self, x: Tensor, edges: Tensor) -> Tensor:
        sums = self.conv(self.net(x, edges), edges)
        return (sums + sums.new_ones(8)) * sums


def test_wrong_places_change_no_gradient() -> None:
    model, exact = ReadsSumsTwice(), ReadsSumsTwice()
    exact.load_state_dict(model.state_dict())
    for part in (model, exact):
        part.net.dropout = torch.nn.Dropout(0.0)
    plan = gact_graph.plan(model, *graph(), memory="1 GB")
    assert "conv/propagate" not in plan.places.proven
    wrong = Places(plan.places.proven | {"conv/propagate"})
    gact_graph.wrap(model, plan=replace(plan, places=wrong))
    for net_ in (model, exact):
        net_(*graph()).square().mean().backward()
    for own, right in zip(model.parameters(), exact.parameters(), strict=True):
        torch.testing.assert_close(own.grad, right.grad, rtol=1e-3, atol=1e-5)


def test_a_run_that_goes_on_knows_the_places() -> None:
    plan, (x, edges) = mixed(net()), graph()
    model, later = (gact_graph.wrap(net(), plan=plan) for _ in range(2))
    model(x, edges).square().mean().backward()
    state = json.loads(json.dumps(gact_graph.state_dict(model)))
    later = gact_graph.wrap(net(), memory=plan.memory)
    gact_graph.load_state_dict(later, state)
    tracked = patch_of(later)
    assert tracked is not None
    assert tracked.controller.methods["forward"].places == plan.places
    state["places"]["proven"] = "all"
    with pytest.raises(TypeError, match="list of names"):
        gact_graph.load_state_dict(later, state)


class LightningModule(nn.Module):
    """Known by its name."""


class OfParts(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = net()


def test_a_plan_of_a_part_names_slots_as_the_whole_model_does() -> None:
    plan = mixed(net())
    model = gact_graph.wrap(OfParts(), memory=plan.memory)
    model.net(*graph()).square().mean().backward()
    patch = patch_of(model)
    assert patch is not None and patch.budget is not None and patch.budget.strategy is not None
    widths = dict(patch.budget.strategy.widths)
    assert widths and all(slot.startswith("net/") for slot in widths)
    rows = {row.slot: row.bits for row in gact_graph.report(model).contexts}
    assert widths.keys() <= rows.keys()
    assert patch.controller.methods["net.forward"].places.proven == {
        f"net/convs.{layer}/propagate" for layer in range(3)
    }
    model.net(*graph(NODES + 100, EDGES))  # plans again, from a strategy with these names
    assert {slot for slot, _ in patch.budget.strategy.widths} <= rows.keys()


def test_a_plan_survives_its_file(tmp_path: Path) -> None:
    plan = mixed(net())
    plan.save(tmp_path / "plan.json")
    assert gact_graph.Plan.load(tmp_path / "plan.json") == plan
    plan.save(tmp_path / "plan.png")
    assert (tmp_path / "plan.png").stat().st_size > 10_000
    with pytest.raises(FileNotFoundError, match="create it first"):
        plan.save(tmp_path / "none" / "plan.png")
    plan.save(tmp_path / "plan.html")
    assert "convs.1" in (tmp_path / "plan.html").read_text(encoding="utf-8")
    text = str(plan)
    assert "norms.0" in text and "exact" in text and "30,000 nodes" in text
    assert "bits" in plan.strategy.name


@pytest.mark.parametrize(
    ("change", "error", "words"),
    [
        ({"format": 0}, ValueError, "make the plan again"),
        ({"peaks": None}, ValueError, "the keys"),
        ({"strategy": "L1"}, ValueError, "the entries of a plan"),
        ({"tensors": [{"bits": 4}]}, ValueError, "the entries of a plan"),
        ({"peaks": [3]}, ValueError, "the entries of a plan"),
    ],
)
def test_another_file_is_refused(
    tmp_path: Path, change: dict[str, Any], error: type[Exception], words: str
) -> None:
    values = gact_graph.plan(net(), *graph(), memory="1 GB").to_dict()
    for key, value in change.items():
        if value is None:
            del values[key]
        else:
            values[key] = value
    path = tmp_path / "plan.json"
    path.write_text(json.dumps(values))
    with pytest.raises(error, match=words):
        gact_graph.Plan.load(path)
    path.write_text("[]")
    with pytest.raises(TypeError, match=r"a mapping, as Plan.to_dict returns it \(got list\)"):
        gact_graph.Plan.load(path)
    path.write_text("nothing")
    with pytest.raises(ValueError, match=r"Expected a plan as JSON in .*plan\.json"):
        gact_graph.Plan.load(path)


def test_a_plan_for_another_model_or_a_smaller_graph_is_refused_with_the_difference() -> None:
    plan = gact_graph.plan(net(), *graph(), memory="1 GB")
    with pytest.raises(ValueError, match=r"'convs.0.att_src' of shape None \(got \[1, 1, 64\]\)"):
        gact_graph.wrap(net(GAT), plan=plan)
    model = gact_graph.wrap(net(), plan=plan)
    with pytest.raises(ValueError, match=r"at most 30,000 nodes .* \(got 40,000 nodes"):
        model(*graph(40_000))
    model(*graph(20_000, 100_000))  # a smaller graph fits


def test_a_plan_for_a_graph_that_is_not_there_yet() -> None:
    small = gact_graph.plan(net(), *graph(), memory="1 GB")
    plan = gact_graph.plan(net(), *graph(), memory="1 GB", nodes=2 * NODES, edges=2 * EDGES)
    assert (plan.nodes, plan.edges) == (2 * NODES, 2 * EDGES)
    growth = (plan.peak_bytes - plan.standing) / (small.peak_bytes - small.standing)
    assert growth == pytest.approx(2, rel=0.05)


@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        ({"memory": "8 gigs"}, ValueError, "Expected memory as a number of bytes"),
        ({"memory": 0}, ValueError, "Expected memory"),
        ({"memory": -5}, ValueError, "Expected memory"),
        ({"memory": float("nan")}, ValueError, "Expected memory"),
        ({"memory": "1 GB", "prefer": "speed"}, ValueError, "Expected prefer to be 'time' or"),
        ({"memory": "1 GB", "nodes": -1}, ValueError, "nodes"),
    ],
)
def test_wrong_arguments(options: dict[str, Any], error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        gact_graph.plan(net(), *graph(100, 500), **options)


@pytest.mark.parametrize(
    ("wrong", "error"),
    [
        ({"nodes": "many"}, TypeError),
        ({"memory": "8 GB"}, TypeError),
        ({"standing": None}, TypeError),
        ({"edges": -1}, ValueError),
        ({"tensors": [1]}, ValueError),
    ],
    ids=str,
)
def test_a_plan_with_a_wrong_entry(wrong: dict[str, Any], error: type[Exception]) -> None:
    values = gact_graph.plan(net(), *graph(100, 500), memory="1 GB").to_dict() | wrong
    with pytest.raises(error, match="Expected"):
        gact_graph.Plan.from_dict(values)


def test_wrap_takes_a_plan_or_a_budget() -> None:
    plan = gact_graph.plan(net(), *graph(), memory="1 GB")
    with pytest.raises(ValueError, match="Expected plan in place of memory='1 GB'"):
        gact_graph.wrap(net(), plan=plan, memory="1 GB")
    with pytest.raises(TypeError, match=r"Expected plan to be a gact_graph.Plan \(got str\)"):
        gact_graph.wrap(net(), plan="plan.json")  # type: ignore[arg-type]


def test_accuracy_first_leaves_a_model_that_fits_as_it_is() -> None:
    name = gact_graph.plan(net(), *graph(), memory="1 GB").strategy.name
    assert name == "lossless + blocks + kept results"
    plan = gact_graph.plan(net(), *graph(), memory="1 GB", prefer="accuracy")
    assert plan.strategy.name == "stock" and plan.error == 0
    assert plan.peak_bytes == plan.stock_bytes


def test_planning_leaves_no_trace() -> None:
    model, inputs = net(), graph()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    state = torch.get_rng_state()
    gact_graph.plan(model, *inputs, memory="80 MB", prefer="accuracy")
    assert torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
    assert all(p.grad is None for p in model.parameters()) and "forward" not in vars(model)


def test_a_budget_beyond_the_machine_is_warned_of() -> None:
    with pytest.warns(RuntimeWarning, match="is more than there is: cpu has"):
        gact_graph.wrap(net(), memory="1000 TB")
    model = net()
    with pytest.raises(ValueError, match="Expected memory"):
        gact_graph.wrap(model, memory=0)
    assert "forward" not in vars(model)  # and nothing is patched


def test_the_table_has_time_and_error_by_layer() -> None:
    plan = mixed(net())
    coded = [tensor for tensor in plan.tensors if " bits" in tensor.choice]
    others = [tensor for tensor in plan.tensors if tensor not in coded]
    assert all(tensor.seconds > 0 and tensor.error > 0 for tensor in coded)
    assert all(tensor.seconds == tensor.error == 0 for tensor in others)
    assert " ms" in str(plan) and " %" in str(plan)


_CAPPED = """
import resource
import sys
import threading
from pathlib import Path

import torch
from torch_geometric.nn import GCN

import gact_graph


def start(thread):
    raise AssertionError("a thread, whose stack takes 8 MB")


torch.set_num_threads(1)  # OpenMP ends a process in which another thread gets no stack
memory, channels = map(int, sys.argv[1:])
model = GCN(64, channels, 3, 8, norm="batch_norm")
x, edges = torch.randn(30_000, 64), torch.randint(30_000, (2, 200_000))
lines = Path("/proc/self/status").read_text().splitlines()
taken = next(int(line.split()[1]) << 10 for line in lines if line.startswith("VmData"))
resource.setrlimit(resource.RLIMIT_DATA, (taken + memory,) * 2)
threading.Thread.start = start
try:
    print(gact_graph.plan(model, x, edges, memory=memory).strategy.level)
except gact_graph.MemoryBudgetError:
    print("refused")
"""


@pytest.mark.long
@pytest.mark.skipif(sys.platform != "linux", reason="no limit of private memory")
@pytest.mark.parametrize("mb", [20, 32, 45])
def test_planning_keeps_to_a_limit_of_the_process(mb: int) -> None:
    """It waited forever for a thread, and measured a disk with as much memory as the budget."""
    ends = ("refused", "lossless", "L1", "L2", "CB2")
    assert run(_CAPPED, str(mb * MB), "64").split()[-1] in ends


@pytest.mark.long
@pytest.mark.skipif(sys.platform != "linux", reason="no limit of private memory")
def test_planning_refuses_a_limit_that_is_too_small_for_a_trial() -> None:
    """A matrix of 16 MB does not fit; Python has memory, without which it may crash."""
    assert run(_CAPPED, str(28 * MB), "2048").split()[-1] == "refused"
