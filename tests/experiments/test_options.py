from __future__ import annotations

from pathlib import Path

import pytest

from experiments.helpers.errors import UsageError
from experiments.helpers.options import parse
from experiments.helpers.recipes import recipe_for


def test_defaults() -> None:
    options = parse(["--model", "gat", "--bits", "4"])
    assert options.dataset == "digits"
    assert options.recipe == recipe_for("gat", "digits")
    assert options.seeds == tuple(range(10))
    assert (options.level, options.fixed, options.compare) == ("L1", False, False)
    assert (options.out, options.data_root) == (None, Path("data"))


def test_flags_override_the_recipe() -> None:
    line = (
        "--model gat --bits 8 --epochs 7 --hidden 16 --layers 3 --heads 2 --dropout 0.25 "
        "--lr 0.1 --weight-decay 0.5 --out DIR --fixed"
    )
    options = parse(line.split())
    recipe = options.recipe
    assert (recipe.epochs, recipe.hidden, recipe.layers, recipe.heads) == (7, 16, 3, 2)
    assert (recipe.dropout, recipe.lr, recipe.weight_decay) == (0.25, 0.1, 0.5)
    assert (options.out, options.fixed) == (Path("DIR"), True)


def test_zero_is_a_value_and_not_a_missing_flag() -> None:
    recipe = parse(
        ["--model", "gcn", "--bits", "4", "--dropout", "0", "--weight-decay", "0"]
    ).recipe
    assert (recipe.dropout, recipe.weight_decay) == (0.0, 0.0)


def test_level_follows_bits() -> None:
    assert parse(["--model", "gcn", "--bits", "32"]).level == "L0"
    assert parse(["--model", "gcn", "--bits", "32", "--level", "L1"]).level == "L1"
    exact = parse(["--model", "gcn", "--bits", "32", "--level", "lossless"])
    assert (exact.level, exact.bits) == ("lossless", 32)
    assert parse(["--model", "gcn", "--compare"]).level == "L1"
    assert parse(["--model", "gcn", "--compare", "--bits", "32"]).level == "L1"


def test_blocks() -> None:
    assert parse(["--model", "gat", "--bits", "4"]).blocks is None
    assert parse(["--model", "gat", "--bits", "4", "--blocks", "auto"]).blocks == "auto"
    options = parse(["--model", "gat", "--bits", "4", "--level", "CB2", "--blocks", "4096"])
    assert (options.level, options.blocks) == ("CB2", 4096)


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("--bits 4", "--model"),
        ("--model gin --bits 4", "gin"),
        ("--model gcn", r"Expected --bits B, or --compare"),
        ("--model gcn --bits 17", r"--bits: Expected a whole number 1 to 16, or 32 \(got '17'\)"),
        ("--model gcn --bits 4 --heads 2", r"Expected --heads with --model gat only"),
        ("--model gcn --bits 4 --level L0", r"Expected --bits 32 with --level L0"),
        (
            "--model gcn --bits 4 --level lossless",
            r"--bits 32 with --level lossless, which quantizes nothing \(got --bits 4\)",
        ),
        ("--model gcn --compare --level lossless", r"\(got --compare\)"),
        ("--model gcn --compare --level L0", r"\(got --compare\)"),
        ("--model gcn --bits 4 --level L9", "L9"),
        ("--model gcn --bits 4 --seeds 9-0", "--seeds: Expected seeds"),
        ("--model gcn --bits 4 --epoch 3", "--epoch"),
        ("--model gcn --bits 4 --out=", r"--out: Expected a path \(got ''\)"),
        ("--model gcn --bits 4 --data-root=", r"--data-root: Expected a path \(got ''\)"),
        ("--model gcn --bits 4 --out \udcff", r"to be UTF-8 text \(got '\\udcff'\)"),
        ("--model gcn --bits 4 --out a\0b", r"to be UTF-8 text \(got 'a\\x00b'\)"),
        ("--model gcn --bits 4 --blocks all", "--blocks: Expected a whole number"),
    ],
)
def test_bad_flags_are_told_in_one_line(line: str, words: str) -> None:
    with pytest.raises(UsageError, match=words) as caught:
        parse(line.split())
    assert "\n" not in str(caught.value)
