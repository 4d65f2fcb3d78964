"""Which slot has how many bits."""

from __future__ import annotations

import json

from gact_graph.report import Row
from gact_graph.scheme import Scheme


def row(slot, numel=1000, bits=2):
    return Row(slot, "node", "quantize", (numel,), numel, bits, 4 * numel, numel)


def test_before_anything_is_measured_the_average_holds():
    assert Scheme(4, {}).bits_of("a") == 4
    assert Scheme(2.9, {}).bits_of("a") == 2
    assert Scheme(1, {}).bits_of("a") == 1


def test_measured_slots_share_the_budget():
    scheme = Scheme(2, {})
    scheme.see([row("a"), row("b"), row("mask", bits=None)])
    assert scheme.free == ["a", "b"] and not scheme.measured
    scheme.measure({"a": 100.0})
    assert not scheme.measured and scheme.bits_of("a") == 2
    scheme.measure({"b": 0.01})
    assert scheme.measured
    assert scheme.bits_of("a") > 2 > scheme.bits_of("b")
    assert scheme.bits_of("a") + scheme.bits_of("b") <= 4


def test_new_measurements_are_smoothed():
    scheme = Scheme(2, {})
    scheme.see([row("a")])
    scheme.measure({"a": 1.0})
    scheme.measure({"a": 3.0})
    assert scheme.sensitivity_of("a") == 2.0
    assert scheme.sensitivity_of("b") is None


def test_pins_hold_and_count():
    scheme = Scheme(4, {"*.lin*": 8, "convs.1*": 2})
    assert scheme.bits_of("convs.1/x.linear") == 8  # the first pattern that matches
    scheme.see([row("convs.0/x.linear", bits=8), row("a"), row("b")])
    assert scheme.free == ["a", "b"]
    scheme.measure({"a": 1.0, "b": 1.0})
    assert [scheme.bits_of(slot) for slot in ("convs.0/x.linear", "a", "b")] == [8, 2, 2]


def test_what_an_operation_asks_for_counts():
    scheme = Scheme(2, {})
    scheme.see([row("sum", numel=10, bits=16), row("a")])
    assert scheme.free == ["a"]
    scheme.measure({"a": 1.0})
    assert scheme.bits_of("sum") == 16


def test_state():
    scheme = Scheme(3, {})
    scheme.see([row("a"), row("b"), row("sum", bits=16)])
    scheme.measure({"a": 1.0, "b": 100.0})
    state = json.loads(json.dumps(scheme.state_dict()))
    other = Scheme(3, {})
    other.load_state_dict(state)
    assert other.state_dict() == scheme.state_dict()
    assert [other.bits_of(s) for s in "ab"] == [scheme.bits_of(s) for s in "ab"]
