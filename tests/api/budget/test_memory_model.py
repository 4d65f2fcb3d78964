"""The peak of each part of a step, for tensors that are exact and tensors in codes."""

from __future__ import annotations

import itertools

import pytest

from gact_graph.api.budget.memory_model import Form, MemoryModel, Timeline, unit_of
from gact_graph.capture.moments import Moment, Moments
from gact_graph.support.rows import Row

FORMS = Form(2), Form(8), Form(32, offloaded=True), Form(32)


def recorded(
    parts: list[tuple[str, bool, int]], stored: dict[str, int], bits: int | None
) -> Moments:
    """A record of 8 elements for each stored byte of codes."""
    moments = Moments(lambda: 0)
    moments.moments = [Moment(*part) for part in parts]
    for name, size in stored.items():
        numel = size * 8 // (bits or 1)
        moments.rows[name] = Row(name, "node", "", (), numel, bits, size, size)
    return moments


EXACT = recorded(
    [
        ("a/x", False, 150),
        ("b/x", False, 250),
        ("b/x", True, 260),
        ("a/x", True, 170),
        ("", True, 9),
    ],
    {"a/x": 100, "b/x": 100},
    None,
)
CODED = recorded(
    [
        ("a/x", False, 150),
        ("b/x", False, 160),
        ("b/x", True, 190),
        ("a/x", True, 180),
        ("", True, 9),
    ],
    {"a/x": 10, "b/x": 10},
    2,
)


def timeline(record: Moments) -> Timeline:
    return Timeline.of(record, record, (1.0, 1.0))


@pytest.fixture
def model() -> MemoryModel:
    exact, coded = timeline(EXACT), timeline(CODED)
    return MemoryModel.of([exact, exact], [coded, coded], 2, FORMS)


def test_uniform_choices_take_what_was_recorded(model: MemoryModel) -> None:
    assert model.units == ("a", "b")
    assert model.peak([0, 0]) == 190 and model.peak([3, 3]) == 260


def test_each_part_takes_the_contexts_alive_and_the_temporary_memory_of_its_own(
    model: MemoryModel,
) -> None:
    # a exact, b in codes: saving b takes 150 besides a's 10 bytes; releasing it 170 besides 20.
    assert model.steady().curve([3, 0]).tolist() == [150, 250, 280, 70 + 100, 9]
    # a in codes of 8 bits, which take 30 bytes more than those of 2.
    assert model.steady().curve([1, 3]).tolist() == [150, 150 + 40, 60 + 140, 170 + 40, 9]


def test_an_offloaded_tensor_takes_memory_in_the_parts_that_read_it(model: MemoryModel) -> None:
    # Releasing b takes 60 besides exact tensors of 100 bytes each; a takes 70 besides its own 100.
    assert model.steady().curve([2, 2]).tolist() == [150, 150, 60 + 110, 70 + 100, 9]
    assert model.steady().curve([3, 2]).tolist() == [150, 250, 60 + 110 + 100, 170, 9]


def test_a_small_tensor_stays_on_the_device() -> None:
    exact, coded = timeline(EXACT), timeline(CODED)
    model = MemoryModel.of([exact, exact], [coded, coded], 2, FORMS, least=101)
    assert model.steady().curve([2, 2])[1] == 250


def test_an_exact_tensor_needs_the_exact_tensors_that_it_is_computed_from() -> None:
    exact, coded = recorded([*EXACT.moments], {"a/x": 100, "b/x": 100}, None), timeline(CODED)
    exact.sources = {"b/x": ["mask"], "mask": ["a/x"]}  # by way of a tensor without a choice
    steps = [timeline(exact)] * 2
    model = MemoryModel.of(steps, [coded, coded], 2, FORMS)
    assert model.needs == [(1, 0)]
    assert model.allows([3, 3]) and model.allows([2, 3]) and model.allows([0, 1])
    assert model.allows([3, 0]) and not model.allows([0, 3]) and not model.allows([1, 2])


def test_wider_codes_take_no_less(model: MemoryModel) -> None:
    for choices in itertools.product(range(2), repeat=2):
        for unit in range(2):
            if choices[unit] == 0:
                wider = [*choices]
                wider[unit] = 1
                assert model.peak(wider) >= model.peak(choices)


def test_two_parts_of_the_graph_give_the_whole() -> None:
    low = recorded([("a/x", False, 40), ("", True, 20)], {"a/x": 10}, 2)
    high = recorded([("a/x", False, 60), ("", True, 20)], {"a/x": 20}, 2)
    whole = Timeline.of(low, high, (0.1, 0.2))
    assert [peak for *_, peak in whole.moments] == pytest.approx([220, 20])
    assert whole.stored["a/x"] == pytest.approx(100)


def test_a_step_that_differs_counts_in_proportion_to_the_larger_part() -> None:
    low = recorded([("b/x", False, 40), ("", True, 20)], {"b/x": 10}, 2)
    high = recorded([("a/x", False, 60), ("", True, 20)], {"a/x": 20}, 2)
    whole = Timeline.of(low, high, (0.1, 0.2))
    assert [peak for *_, peak in whole.moments] == pytest.approx([300, 100])


def test_contexts_of_a_module_share_their_choice() -> None:
    assert unit_of("convs.0/lin/linear.input") == unit_of("convs.0/lin/linear.weight 2")
    assert unit_of("relu.result") == ""
