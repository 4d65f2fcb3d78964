"""Which slot has how many bits."""

from __future__ import annotations

import json

import pytest

from gact_graph.adaptive.allocator import SLOT_WIDTHS
from gact_graph.adaptive.scheme import Scheme
from gact_graph.support.rows import Row


def row(slot, numel=1000, bits=2):
    return Row(slot, "node", "quantize", (numel,), numel, bits, 4 * numel, numel)


def test_before_anything_is_measured_the_average_holds():
    assert Scheme(4, {}, 256).bits_of("a") == 4
    assert Scheme(2.9, {}, 256).bits_of("a") == 2
    assert Scheme(1, {}, 256).bits_of("a") == 1


def test_measured_slots_share_the_budget():
    scheme = Scheme(3, {}, 256)
    scheme.see([row("a"), row("b"), row("mask", bits=None)])
    assert scheme.free == ["a", "b"] and not scheme.measured
    scheme.measure({"a": 1.0}, error=0.0, explained=0.0)
    assert scheme.measured and scheme.bits_of("a") == scheme.bits_of("b") == 3
    scheme.measure({"b": 1e-4}, error=0.0, explained=0.0)
    assert scheme.measured
    assert scheme.bits_of("a") > 3 > scheme.bits_of("b")
    assert scheme.bits_of("a") + scheme.bits_of("b") <= 6


def test_smaller_measurements_are_smoothed_and_larger_ones_count_at_once():
    scheme = Scheme(2, {}, 256)
    scheme.see([row("a")])
    for _ in range(2):
        scheme.measure({"a": 3.0}, error=0.0, explained=0.0)
    scheme.measure({"a": 1.0}, error=0.0, explained=0.0)
    assert scheme.sensitivity_of("a") == 2.0
    scheme.measure({"a": 5.0}, error=0.0, explained=0.0)
    assert scheme.sensitivity_of("a") == 5.0
    assert scheme.sensitivity_of("b") is None


def test_first_measurements_keep_no_bits_after_the_second():
    scheme = Scheme(2, {}, 256)
    scheme.see([row("early"), row("late")])
    scheme.measure({"early": 1.0, "late": 0.01}, error=0.0, explained=0.0)
    scheme.measure({"early": 0.01, "late": 0.1}, error=0.0, explained=0.0)
    assert scheme.sensitivity_of("early") == 0.01
    assert [scheme.bits_of(slot) for slot in ("early", "late")] == [1, 3]


def test_a_slot_gets_few_bits_only_after_two_measurements():
    scheme = Scheme(4, {}, 256)
    scheme.see([row("a"), row("b")])
    scheme.measure({"a": 1.0, "b": 1e-6}, error=0.0, explained=0.0)
    assert [scheme.bits_of(slot) for slot in "ab"] == [5, 3]
    scheme.measure({"a": 1.0, "b": 1e-6}, error=0.0, explained=0.0)
    assert [scheme.bits_of(slot) for slot in "ab"] == [7, 1]


def test_an_error_larger_than_the_slots_explain_counts():
    scheme = Scheme(2, {}, 256)
    scheme.see([row("a")])
    scheme.measure({"a": 0.9}, error=0.2, explained=0.3)  # 0.9 * S(2) = 0.1
    assert scheme.variance_ratio == pytest.approx(0.1)
    assert scheme.gradient_error == 0.2
    scheme.measure({"a": 0.9}, error=0.6, explained=0.3)
    assert scheme.variance_ratio == pytest.approx(0.9 * 4 / 49)  # 3 bits by now


@pytest.mark.parametrize(("sensitivity", "average"), [(1.0, 2), (20.0, 2.5), (1e6, 3)])
def test_an_error_too_large_gets_bits_on_top_of_the_average(sensitivity, average):
    scheme = Scheme(2, {}, 256)
    scheme.see([row("a"), row("b")])
    for _ in range(2):
        scheme.measure({"a": sensitivity, "b": 1e-9}, error=0.5, explained=0.5)
    assert (scheme.bits_of("a") + scheme.bits_of("b")) / 2 == average


def test_pins_hold_and_come_on_top():
    scheme = Scheme(4, {"*.lin*": 8, "convs.1*": 2}, 256)
    assert scheme.bits_of("convs.1/x.linear") == 8  # the first pattern that matches
    scheme.see([row("convs.0/x.linear", bits=8), row("a"), row("b")])
    assert scheme.free == ["a", "b"]
    scheme.measure({"a": 1.0, "b": 1.0}, error=0.0, explained=0.0)
    assert [scheme.bits_of(slot) for slot in ("convs.0/x.linear", "a", "b")] == [8, 4, 4]


def test_bits_that_an_operation_needs_come_on_top():
    scheme = Scheme(4, {}, 256)
    scheme.see([row("sum", bits=16), row("a"), row("b")])
    assert scheme.free == ["a", "b"]
    scheme.measure({"a": 1.0, "b": 1.0}, error=0.0, explained=0.0)
    assert [scheme.bits_of(slot) for slot in ("sum", "a", "b")] == [16, 4, 4]


def test_slots_with_widths_by_group_share_the_budget_in_quarters():
    scheme = Scheme(2, {}, 256)
    scheme.see([row("a", numel=256_000), row("b", numel=256_000), row("small", numel=1000)])
    for _ in range(3):  # until few bits are trusted
        scheme.measure({"a": 0.03, "b": 0.01, "small": 1e-4}, error=0.0, explained=0.0)
    assert [scheme.bits_of(slot) for slot in "ab"] == [2.25, 1.75]
    assert scheme.bits_of("small") in SLOT_WIDTHS
    state = json.loads(json.dumps(scheme.state_dict()))
    Scheme.check_state("state", state)
    other = Scheme(2, {}, 256)
    other.load_state_dict(state)
    assert other.state_dict() == scheme.state_dict()


def test_a_least_width_is_a_whole_number():
    """A backward inside a forward may allocate bits that the forward does not have yet."""
    scheme = Scheme(2, {}, 256)
    scheme.see([row("a", bits=2.25)])
    state = json.loads(json.dumps(scheme.state_dict()))
    Scheme.check_state("state", state)
    assert scheme.bits_of("a") == 2 and state["least"] == {"a": 3}


def test_state():
    scheme = Scheme(3, {}, 256)
    scheme.see([row("a"), row("b"), row("sum", bits=16)])
    scheme.measure({"a": 1.0, "b": 100.0}, error=0.0, explained=0.0)
    state = json.loads(json.dumps(scheme.state_dict()))
    other = Scheme(3, {}, 256)
    other.load_state_dict(state)
    assert other.state_dict() == scheme.state_dict()
    assert [other.bits_of(s) for s in "ab"] == [scheme.bits_of(s) for s in "ab"]


def test_a_slot_that_could_not_be_measured_yet_does_not_stop_the_others():
    scheme = Scheme(2, {}, 256)
    scheme.see([row("a")])
    scheme.measure({"a": 1.0}, error=0.0, explained=0.0)
    scheme.see([row("b"), row("c")])
    scheme.measure({"b": 1.0}, error=0.0, explained=0.0)
    assert scheme.variance_ratio > 0
    assert scheme.average_for(scheme.variance_ratio / 2) is not None


def test_slots_of_forwards_that_are_never_measured_do_not_stop_the_others():
    """A loop over four kinds of batches may meet the interval of measurements with one of them."""
    scheme = Scheme(3, {}, 256)
    scheme.see([row("a"), row("b"), row("of another batch")])
    for _ in range(2):
        scheme.measure({"a": 1.0, "b": 1000.0}, error=0.0, explained=0.0)
    assert scheme.bits_of("a") < 3 < scheme.bits_of("b")
    assert scheme.bits_of("of another batch") == 3


def test_against_some_errors_no_average_of_bits_helps():
    scheme = Scheme(2, {}, 256)
    scheme.see([row("a")])
    scheme.measure({"a": 1e12}, error=0.5, explained=0.5)
    assert scheme.average_for(1e3) is not None and scheme.average_for(0.1) is None
