"""Settings and the table of levels."""

import dataclasses

import pytest

from gact_graph.config import LEVELS, Config


def test_defaults_are_those_of_wrap():
    import inspect

    import gact_graph

    signature = inspect.signature(gact_graph.wrap).parameters
    for field in dataclasses.fields(Config):
        assert signature[field.name].default == field.default


def test_is_frozen():
    with pytest.raises(dataclasses.FrozenInstanceError):
        Config().bits = 2


@pytest.mark.parametrize("bits", [*range(1, 17), 32])
def test_every_width(bits):
    assert Config(bits=bits).quantize == (bits < 32)


@pytest.mark.parametrize("level", LEVELS)
def test_levels(level):
    assert Config(level=level).quantize == (level == "L1")


@pytest.mark.parametrize("seed", [0, -1, 2**70])
def test_any_integer_is_a_seed(seed):
    assert Config(seed=seed).seed == seed
