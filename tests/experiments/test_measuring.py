from __future__ import annotations

import pytest

from experiments.helpers.train import cost_of_measuring


def test_steps_that_measured_are_set_against_the_others() -> None:
    seconds, passes = [9.0, 2.0, 3.0, 7.0, 2.0, 4.0, 6.0, 2.0], [0, 0, 1, 3, 3, 4, 6, 6]
    assert cost_of_measuring(seconds, passes) == {
        "step_seconds": 2.0,
        "first_measurement_steps": pytest.approx(0.5 + 2.5),
        "measuring_steps": pytest.approx(0.5 + 2.5 + 1 + 2),
    }


def test_nothing_was_measured() -> None:
    costs = cost_of_measuring([2.0, 1.0, 1.0], [0, 0, 0])
    assert costs == {"step_seconds": 1.0, "first_measurement_steps": 0, "measuring_steps": 0.0}


def test_nothing_is_known_where_every_step_measured() -> None:
    assert cost_of_measuring([1.0, 2.0], [1, 3]) == {}
