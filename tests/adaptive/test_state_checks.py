"""A saved state is loaded whole, or refused in words that name the entry."""

from __future__ import annotations

import copy
import json
import math

import pytest
import torch
from torch import nn
from torch_geometric.nn import GAT, TransformerConv

import gact_graph


def make(**options):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 64), nn.GELU())
    return gact_graph.wrap(model, bits=2, min_bytes=0, **options)


def steps(model, count):
    for step in range(count):
        torch.manual_seed(step)
        model.zero_grad()
        model(torch.randn(64, 64)).square().mean().backward()


@pytest.fixture(scope="module")
def trained():
    model = make(adapt_interval=1)
    steps(model, 3)
    return gact_graph.state_dict(model)


# What version 0.6.0 wrote of this model after the same steps.
OLD = {
    "forwards": 3,
    "scheme": {
        "sizes": {"1/gelu.input": 4096, "2/linear.input": 4096, "3/gelu.input": 4096},
        "sensitivities": {
            "1/gelu.input": 0.207598660702634,
            "2/linear.input": 0.2511188079024581,
            "3/gelu.input": 0.05356393364184483,
        },
        "bits": {"1/gelu.input": 2, "2/linear.input": 2, "3/gelu.input": 2},
        "least": {},
    },
    "adaptation": {"forwards": 3, "turn": 2, "passes": 8},
}


def changed(state, path, value):
    state = copy.deepcopy(state)
    inner = state
    for key in path[:-1]:
        inner = inner[key]
    if value is KeyError:
        del inner[path[-1]]
    else:
        inner[path[-1]] = value
    return state


SLOT = "1/gelu.input"
WRONG = [
    (("scheme", "bits", SLOT), 99, ValueError, r"Expected state\['scheme'\]\['bits'\]\['1/gelu"),
    (("scheme", "bits", SLOT), 0, ValueError, r"to be 1 to 16, or 32, in quarters.* \(got 0\)"),
    (("scheme", "bits", SLOT), 2.1, ValueError, r"in quarters below 8 \(got 2.1\)"),
    (("scheme", "bits", SLOT), 8.5, ValueError, r"in quarters below 8 \(got 8.5\)"),
    (("scheme", "bits", SLOT), True, TypeError, r"to be a number \(got bool\)"),
    (("scheme", "least", SLOT), 4.0, TypeError, r"to be an int \(got float\)"),
    (("scheme", "bits", 7), 4, TypeError, r"Expected state\['scheme'\]\['bits'\] to have str keys"),
    (("scheme", "bits", "new"), 4, ValueError, r"\['sizes'\] to have each slot .*for 'new'\)"),
    (("scheme", "bits"), [4], TypeError, r"to map names of slots to values \(got list\)"),
    (("scheme", "least", SLOT), 17, ValueError, r"\['least'\].* \(got 17\)"),
    (("scheme", "sensitivities", SLOT), math.nan, ValueError, r"finite and 0 or more \(got nan\)"),
    (("scheme", "sensitivities", SLOT), math.inf, ValueError, r"finite and 0 or more \(got inf\)"),
    (("scheme", "sensitivities", SLOT), -1.0, ValueError, r"finite and 0 or more \(got -1.0\)"),
    (("scheme", "sensitivities", SLOT), "1", TypeError, r"to be a number \(got str\)"),
    (("scheme", "sizes", SLOT), -1, ValueError, r"\['sizes'\].* to be 0 or more \(got -1\)"),
    (("scheme", "sizes"), KeyError, ValueError, r"Expected state\['scheme'\] .*\(got no 'sizes'\)"),
    (("scheme", "more"), 1, ValueError, r"\(got also 'more'\)"),
    (("scheme",), None, TypeError, r"Expected state\['scheme'\] to be a mapping"),
    (("scheme",), KeyError, ValueError, r"\(got no 'scheme'\)"),
    (("forwards",), -1, ValueError, r"Expected state\['forwards'\] to be 0 or more \(got -1\)"),
    (("forwards",), None, TypeError, r"Expected state\['forwards'\] to be an int \(got None\)"),
    (
        ("adaptation", "forwards"),
        KeyError,
        ValueError,
        r"Expected state\['adaptation'\].*no 'forwards'",
    ),
    (("adaptation", "forwards"), "0", TypeError, r"\['adaptation'\]\['forwards'\] to be an int"),
    (("scheme", "times"), {"1/gelu.input": -1}, ValueError, r"\['times'\].* 0 or more \(got -1\)"),
    (("scheme", "excess"), math.nan, ValueError, r"\['excess'\] to be finite and 0 or more"),
    (("scheme", "gradient_error"), "0", TypeError, r"\['gradient_error'\] to be a number"),
    (("adaptation", "forwards"), -3, ValueError, r"\['forwards'\] to be 0 or more \(got -3\)"),
    (("adaptation", "row_weights"), {"a": 3}, TypeError, r"\['row_weights'\]\['a'\] to be a str"),
    (("adaptation", "trained"), 3, TypeError, r"\['trained'\] to be a list of names"),
    (("adaptation", "progress"), {"wait": 0}, ValueError, r"\['progress'\] to have the keys"),
    (("adaptation", "others"), {"01": 3}, TypeError, r"\['others'\]\['01'\] to be a mapping"),
    (("adaptation",), KeyError, ValueError, r"\(got no 'adaptation'\)"),
    (
        ("exactly",),
        {"with_leaf": 5, "without": [], "decided": True},
        TypeError,
        r"Expected state\['exactly'\]\['with_leaf'\] to be a list of names \(got int\)",
    ),
    (
        ("exactly",),
        {"with_leaf": [], "without": "ab", "decided": True},
        TypeError,
        r"\['without'\] to be a list of names \(got str\)",
    ),
    (
        ("exactly",),
        {"with_leaf": [], "without": [], "decided": "no"},
        TypeError,
        r"\['decided'\] to be a bool \(got str\)",
    ),
    (("adaptation",), 3, TypeError, r"Expected state\['adaptation'\] to be a mapping"),
]


@pytest.mark.parametrize(("path", "value", "error", "words"), WRONG)
def test_a_wrong_state_is_refused_and_nothing_is_taken(trained, path, value, error, words):
    model = make(adapt_interval=1)
    gact_graph.load_state_dict(model, trained)
    newer = changed(OLD, ("forwards",), 1000)  # what would be seen if it were taken in part
    with pytest.raises(error, match=words):
        gact_graph.load_state_dict(model, changed(newer, path, value))
    assert gact_graph.state_dict(model) == trained


@pytest.mark.parametrize("state", [None, [], 3, "state", {}])
def test_values_that_are_no_state_are_refused(state):
    with pytest.raises((TypeError, ValueError), match="Expected state to "):
        gact_graph.load_state_dict(make(), state)


def test_a_state_of_version_0_6_0_loads():
    model = make()
    gact_graph.load_state_dict(model, OLD)
    new = gact_graph.state_dict(model)
    assert new["forwards"] == OLD["forwards"]
    assert OLD["scheme"].items() <= new["scheme"].items()
    counters = {"forwards": OLD["adaptation"]["forwards"], "measurements": 0}
    assert counters.items() <= new["adaptation"].items()
    assert new["adaptation"]["row_weights"] == new["adaptation"]["others"] == {}
    steps(model, 2)


# Slots and bits of two layers in states that version 0.6.0 saved, by elements and bits.
OLD_SLOTS = {
    "gat": (
        lambda: GAT(32, 32, 2, heads=4),
        {
            "convs.0/mul.input": (9600, 6),
            "convs.0/edge_update/softmax.exp.result": (9180, 4),
            "convs.0/message/mul.input": (9180, 5),
            "convs.1/lin/linear.input": (9600, 4),
            "convs.1/mul.input": (9600, 3),
            "convs.1/edge_update/softmax.exp.result": (9180, 2),
            "convs.1/message/mul.input": (9180, 3),
        },
    ),
    "transformer": (
        lambda: TransformerConv(32, 16, heads=2),
        {
            "message/mul.other.source": (9600, 4),
            "message/mul.input.source": (9600, 4),
            "message/softmax.exp.result": (4000, 3),
            "message/mul#2.other": (4000, 5),
            "message/mul#2.input.source": (9600, 4),
        },
    ),
}


@pytest.mark.parametrize("name", OLD_SLOTS)
def test_slots_have_the_names_of_version_0_6_0(name):
    layer, slots = OLD_SLOTS[name]
    state = {
        "forwards": 3,
        "scheme": {
            "sizes": {slot: size for slot, (size, _) in slots.items()},
            "sensitivities": dict.fromkeys(slots, 0.1),
            "bits": {slot: bits for slot, (_, bits) in slots.items()},
            "least": {},
        },
        "adaptation": {"forwards": 3, "turn": 2, "passes": 8},
    }
    torch.manual_seed(0)
    model = gact_graph.wrap(layer(), bits=4, blocks=False, min_bytes=0)
    gact_graph.load_state_dict(model, state)
    x, edge_index = torch.randn(300, 32), torch.randint(300, (2, 2000))
    model(x, edge_index).square().mean().backward()
    # Each slot that is still coded has the bits that the state gives it; the others are computed
    # again from them. The step brought no other slots.
    rows = {row.slot: row for row in gact_graph.report(model).contexts if row.slot in slots}
    coded = {slot: row.bits for slot, row in rows.items() if row.codec != "rebuild"}
    assert coded
    # Exponentials have 4 bits at least, since version 0.8.
    least = {slot: 4 if slot.endswith("exp.result") else 1 for slot in coded}
    assert coded == {slot: max(slots[slot][1], least[slot]) for slot in coded}
    assert gact_graph.state_dict(model)["scheme"]["sizes"].keys() == slots.keys()


def test_slots_of_version_0_7_0_that_have_other_names_now():
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.randn(64, 64))

        def forward(self, x):
            h = x @ self.weight
            scores = torch.einsum("ij,kj->ik", h * 2, h.exp())
            return (scores @ (h * 3)).mul_(h.exp())

    slots = {"exp.result": 9, "einsum.operands": 3, "matmul#2.input": 5, "matmul#2.other": 6}
    slots |= {"exp#2.result": 7, "mul.result": 8}
    model = gact_graph.wrap(Net(), bits=4, level="L1", min_bytes=0)
    state = gact_graph.state_dict(model)
    state["scheme"] |= {
        "sizes": dict.fromkeys(slots, 19200),
        "sensitivities": dict.fromkeys(slots, 0.1),
        "bits": slots,
        "times": dict.fromkeys(slots, 3),
    }
    state["exactly"]["with_leaf"] = ["conv/matmul.other", "conv/softmax.exp.result"]
    gact_graph.load_state_dict(model, state)
    model(torch.randn(300, 64)).square().mean().backward()
    rows = {row.slot: row.bits for row in gact_graph.report(model).contexts}
    now = {"exp.result": 9, "einsum.input": 3, "matmul#2.input": 5, "matmul#2.mat2": 6}
    now |= {"exp#2.result": 7, "mul.input": 8}
    assert rows == now
    new = gact_graph.state_dict(model)
    assert new["scheme"]["sizes"].keys() == now.keys()
    assert new["exactly"]["with_leaf"] == ["conv/matmul.mat2", "conv/softmax.exp.result"]


def test_a_state_that_went_through_json_loads(trained):
    model = make(adapt_interval=1)
    gact_graph.load_state_dict(model, json.loads(json.dumps(trained)))
    assert gact_graph.state_dict(model) == trained
    steps(model, 2)


def test_the_state_loaded_is_a_copy(trained):
    model, state = make(adapt_interval=1), copy.deepcopy(trained)
    gact_graph.load_state_dict(model, state)
    steps(model, 3)
    assert state == trained


@pytest.mark.parametrize("pin", ["*.lin*", ["*"], 8])
def test_pins_that_are_no_mapping_are_refused(pin):
    with pytest.raises(TypeError, match="Expected pin to map patterns of slot names to bits"):
        gact_graph.wrap(nn.Linear(2, 2), pin=pin)
