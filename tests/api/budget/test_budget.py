"""A model that is given a memory budget."""

import copy

import pytest
import torch
from torch import nn
from torch_geometric.nn import GAE, GCNConv

import gact_graph
from gact_graph.api.budget import budget as budgets
from gact_graph.api.budget.estimate import Cost, Estimate, Line, strategies
from gact_graph.api.budget.miniature import GraphSize, Miniature

MB = 10**6


def graph(nodes=300, edges=2000):
    torch.manual_seed(0)
    return torch.randn(nodes, 16), torch.randint(nodes, (2, edges))


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.one, self.two = GCNConv(16, 32), GCNConv(32, 3)

    def forward(self, x, edge_index):
        return self.two(self.one(x, edge_index).relu(), edge_index)


@pytest.fixture(autouse=True)
def known_costs(monkeypatch):
    """Stock takes 100 MB for 300 nodes, each way after it 5 MB less: whatever the machine does."""
    calls = []

    def estimate_call(model, method, inputs, config, memory, nodes, edges, first, choosing):
        calls.append(method)
        given = Miniature(*inputs).size
        size = GraphSize(nodes or given.nodes, edges or given.edges)
        share = size.nodes / 300
        costs = {
            way: Cost(Line(0.0, share * (100 - 5 * index) * MB), Line(0.0, MB))
            for index, way in enumerate(strategies("cpu"))
        }
        return Estimate(costs, size, memory, quarters=config.adaptive)

    monkeypatch.setattr(budgets, "estimate_call", estimate_call)
    return calls


def step(model, inputs):
    model.zero_grad()
    model(*inputs).square().mean().backward()
    return torch.cat([p.grad.flatten() for p in model.parameters()])


def chosen(model):
    return gact_graph.report(model).strategy


def test_enough_memory_leaves_the_model_as_it_is():
    model, stock = gact_graph.wrap(Net(), memory="200 MB"), Net()
    assert torch.equal(step(model, graph()), step(stock, graph()))
    assert chosen(model) == "stock"
    assert "trains without compression" in str(gact_graph.report(model))


@pytest.mark.parametrize(
    ("memory", "way", "level"),
    [("105 MB", "lossless", "lossless"), ("100 MB", "lossless + blocks", "lossless")],
)
def test_exact_ways_come_first(memory, way, level):
    model, stock = gact_graph.wrap(Net(), memory=memory), Net()
    torch.testing.assert_close(step(model, graph()), step(stock, graph()))
    assert chosen(model) == way and model.forward.controller.config.level == level


def test_then_more_bits_before_fewer():
    model = gact_graph.wrap(Net(), memory="85 MB")
    step(model, graph())
    assert chosen(model) == "L1, 7.25 bits"
    assert model.forward.controller.config.bits == 7.25


def test_bits_are_whole_where_slots_do_not_share_them_out():
    model = gact_graph.wrap(Net(), memory="85 MB", adaptive=False)
    step(model, graph())
    assert chosen(model) == "L1, 7 bits"


def test_more_memory_never_means_fewer_bits():
    found = []
    for memory in range(60, 90):
        model = gact_graph.wrap(Net(), memory=f"{memory} MB")
        step(model, graph())
        config = model.forward.controller.config
        found.append(config.bits)
    assert found == sorted(found) and len({*found}) > 6 and {b % 0.25 for b in found} == {0}


def test_a_larger_graph_has_it_step_down_and_a_smaller_one_changes_nothing(known_costs):
    model = gact_graph.wrap(Net(), memory="120 MB")
    found = []
    for nodes, edges in ((300, 2000), (200, 1000), (420, 2000), (300, 2400), (420, 2400)):
        step(model, graph(nodes, edges))
        found.append(chosen(model))
    assert found == ["stock", "stock", "L1, 7.25 bits", "L1, 7.25 bits", "L1, 7.25 bits"]
    # At first, when stock did not fit any more, and when seven bits did not by that.
    assert known_costs == ["forward"] * 3


def test_nothing_fits():
    model = gact_graph.wrap(Net(), memory="10 MB")
    with pytest.raises(
        gact_graph.MemoryBudgetError,
        match=r"got 9.5 MiB .* the smallest, .*, takes .* and needs a budget of .*\); pass .* more",
    ):
        step(model, graph())
    assert chosen(model) is None


def test_the_least_budget_suffices_and_a_byte_less_does_not(known_costs):
    found = gact_graph.estimate(Net(), *graph())
    way, peak = found.smallest()
    least = found.budget_for(peak)
    assert found.within(least).choose() == way
    assert found.within(least - 1).choose() is None


def test_a_later_batch_for_which_nothing_fits_leaves_the_model_as_it_was():
    model = gact_graph.wrap(Net(), memory="200 MB")
    step(model, graph())
    with pytest.raises(gact_graph.MemoryBudgetError):
        step(model, graph(300 * 100))
    assert chosen(model) == "stock"
    step(model, graph())


def test_evaluation_does_not_choose():
    model = gact_graph.wrap(Net(), memory="200 MB").eval()
    model(*graph())
    assert chosen(model) is None


def test_state_resumes_in_the_same_way(known_costs):
    model = gact_graph.wrap(Net(), memory="85 MB")
    for _ in range(2):
        step(model, graph())
    state = gact_graph.state_dict(model)
    other = gact_graph.wrap(Net(), memory="85 MB")
    gact_graph.load_state_dict(other, state)
    assert chosen(other) == "L1, 7.25 bits" and gact_graph.state_dict(other) == state
    for level, bits in (("L9", 1), ("L1", 7.3), ("L1", 8.25), ("L1", "7"), ("L1", float("nan"))):
        strategy = {"level": level, "bits": bits, "blocks": True}
        with pytest.raises(ValueError, match=r"Expected state\['strategy'\] to be a strategy"):
            gact_graph.load_state_dict(other, state | {"strategy": strategy})
    with pytest.raises(ValueError, match="scheme"):
        gact_graph.load_state_dict(other, state | {"scheme": {}, "strategy": None})
    assert gact_graph.state_dict(other) == state


def test_a_copy_chooses_for_itself_and_unwrap_restores_the_class():
    model = gact_graph.wrap(Net(), memory="200 MB")
    other = copy.deepcopy(model)
    step(other, graph())
    assert chosen(other) == "stock" and chosen(model) is None
    gact_graph.unwrap(model)
    assert "forward" not in vars(model)


def test_other_methods_are_followed():
    model = gact_graph.wrap(GAE(Net()), memory="85 MB")
    x, edges = graph()
    model.recon_loss(model.encode(x, edges), edges).backward()
    assert chosen(model) == "L1, 7.25 bits"


class Links(Net):
    def encode(self, x, edge_index):
        return self.forward(x, edge_index)

    def decode(self, z, edge_label_index):
        return (z[edge_label_index[0]] * z[edge_label_index[1]]).sum(dim=-1)


def test_each_method_has_a_largest_graph_of_its_own(known_costs):
    """More pairs of nodes to decode say nothing about the edges to encode along."""
    model = gact_graph.wrap(Links(), memory="120 MB", methods=("encode", "decode"))
    for edges, pairs in ((2000, 3000), (2900, 2900)):
        z = model.encode(*graph(edges=edges))
        model.decode(z, graph(edges=pairs)[1]).sum().backward()
    assert known_costs == ["encode", "decode", "encode"] and chosen(model) == "stock"


def test_a_loop_that_calls_another_method_is_warned_that_the_budget_does_nothing():
    model = gact_graph.wrap(Links(), memory="8 GB")
    x, edges = graph()
    z = model.one(x, edges)
    with pytest.warns(RuntimeWarning, match="nothing was compressed.*methods="):
        model.decode(z, edges).sum().backward()
    step(model, (x, edges))  # and once it acts, no hooks are left
    assert not model.one._forward_hooks


def test_a_part_of_a_loop_has_no_budget():
    model = gact_graph.wrap(Links(), memory="8 GB")
    with (
        pytest.raises(ValueError, match="rather than memory inside compress"),
        gact_graph.compress(model),
    ):
        pass


@pytest.mark.parametrize(
    ("options", "given"),
    [
        ({"bits": 2}, "bits=2"),
        ({"bits": 4}, "bits=4"),
        ({"level": "L1"}, "level='L1'"),
        ({"level": "CB2", "blocks": False}, "level='CB2', blocks=False"),
        ({"blocks": 100}, "blocks=100"),
    ],
)
def test_memory_stands_in_place_of_other_options(options, given):
    words = rf"Expected memory in place of bits, level and blocks, which .* \(got {given} too\)"
    with pytest.raises(ValueError, match=words):
        gact_graph.wrap(Net(), memory="8 GB", **options)


def test_inputs_without_a_graph_are_refused():
    model = gact_graph.wrap(nn.Linear(3, 3), memory="8 GB")
    with pytest.raises(ValueError, match=r"Expected inputs that contain a graph, for memory="):
        model(torch.randn(5, 3))


def test_graphs_are_as_large_as_all_their_parts():
    assert GraphSize(300, 2000) == Miniature(graph(), {}).size
