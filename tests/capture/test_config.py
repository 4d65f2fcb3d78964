"""Settings and the table of levels."""

import dataclasses

import pytest
from torch import nn

import gact_graph
from gact_graph.api.install import patch_of
from gact_graph.capture.config import LEVELS, Config


def test_defaults_are_those_of_wrap():
    for field in dataclasses.fields(Config):
        # None where wrap has to tell what was given from what was not; plans set two.
        if field.name not in ("bits", "level", "pin", "widths", "offloaded", "keep_results"):
            assert gact_graph.wrap.__kwdefaults__[field.name] == field.default
    config = patch_of(gact_graph.wrap(nn.Linear(3, 3))).controller.config
    assert config == Config()


def test_is_frozen():
    with pytest.raises(dataclasses.FrozenInstanceError):
        Config().bits = 2


@pytest.mark.parametrize("bits", [*range(1, 17), 32])
def test_every_width(bits):
    assert Config(bits=bits, adaptive=False).quantize == (bits < 32)


@pytest.mark.parametrize("level", LEVELS)
def test_levels(level):
    config = Config(level=level)
    assert config.quantize == (level not in ("L0", "lossless"))
    assert config.exact == (level != "L0")
    assert config.recompute == level.startswith("CB")
    assert config.swap == (level == "L2")
    # Layers run in blocks unless results are to be those of stock.
    assert config.block_size == ("auto" if config.quantize else None)
    assert Config(level=level, blocks=7).block_size == 7
    assert Config(level=level, blocks=1).block_size == 1
    assert Config(level=level, blocks=True).block_size == "auto"
    assert Config(level=level, blocks=False).block_size is None


@pytest.mark.parametrize("seed", [0, -1, 2**70])
def test_any_integer_is_a_seed(seed):
    assert Config(seed=seed).seed == seed


@pytest.mark.parametrize("bits", [1, 1.5, 2.25, 16, 32])
def test_an_average_may_be_a_fraction(bits):
    assert Config(bits=bits, adaptive=True).quantize == (bits < 32)


@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        ({"bits": 1.5, "adaptive": False}, TypeError, r"Expected bits to be an int \(got float\)"),
        ({"bits": 0.5, "adaptive": True}, ValueError, r"from 1 to 16, or 32 .*got 0.5"),
        ({"bits": "2", "adaptive": True}, TypeError, r"Expected bits to be a number \(got str\)"),
        ({"adapt_interval": 0}, ValueError, r"Expected adapt_interval to be 1 or more \(got 0\)"),
        ({"adaptive": "no"}, TypeError, r"Expected adaptive to be True or False \(got str\)"),
        ({"adaptive": 1}, TypeError, r"Expected adaptive to be True or False \(got int\)"),
        (
            {"group_size": 64 * 10**30},
            ValueError,
            r"at most 1048576 and a positive multiple of 64 ",
        ),
        ({"blocks": 10**30}, ValueError, r"Expected blocks of 1 to 2\^40 edges \(got 1000"),
        ({"blocks": "all"}, TypeError, r"'auto', a number of edges or False \(got 'all'\)"),
        ({"blocks": 7.0}, TypeError, r"'auto', a number of edges or False \(got float\)"),
        ({"blocks": 0}, ValueError, r"Expected blocks of 1 to 2\^40 edges \(got 0\)"),
        ({"pin": {3: 4}}, TypeError, r"Expected pin's patterns to be str \(got int\)"),
        ({"pin": {"*": 40}}, ValueError, r"Expected bits to be 1 to 16, or 32 .*got 40"),
    ],
)
def test_bad_input(options, error, words):
    with pytest.raises(error, match=words):
        Config(**options)
