"""The values of flags: what is taken, and what is refused in one line."""

from __future__ import annotations

from argparse import ArgumentTypeError

import pytest
import torch

from experiments.helpers import values
from experiments.helpers.errors import UsageError


@pytest.mark.parametrize(
    ("text", "seeds"),
    [
        ("4", (4,)),
        ("0-9", tuple(range(10))),
        ("0,3,5", (0, 3, 5)),
        ("0-2,7, 1", (0, 1, 2, 7)),
        ("3-3", (3,)),
    ],
)
def test_seeds(text: str, seeds: tuple[int, ...]) -> None:
    assert values.parse_seeds(text) == seeds


@pytest.mark.parametrize("text", ["", "a", "1-", "-1", "1,,2", "1.5", "9-0", "4294967296", "²"])
def test_bad_seeds(text: str) -> None:
    with pytest.raises(ArgumentTypeError, match=r"Expected seeds .* \(got "):
        values.parse_seeds(text)


@pytest.mark.parametrize(
    ("parse", "text", "words"),
    [
        (values.parse_seeds, "0-4294967295", r"Expected at most 10,000 seeds \(got '0-4294967295'"),
        (values.parse_seeds, "0-9999,10000", r"Expected at most 10,000 seeds"),
        (values.parse_seeds, "9" * 5000, r"below 2\^32 \(got '9{40}\.\.\.9{10}'\)"),
        (values.parse_count, "9" * 5000, r"from 1 to 10\^12 \(got '9{40}\.\.\.9{10}'\)"),
        (values.parse_count, "1000000000001", r"from 1 to 10\^12 \(got '1000000000001'\)"),
        (values.parse_bits, "9" * 5000, r"1 to 16, or 32 \(got '9{40}\.\.\.9{10}'\)"),
        (values.parse_draws, "2", r"Expected at least 3 draws \(got '2'\)"),
        (values.parse_path, "", r"Expected a path \(got ''\)"),
    ],
)
def test_absurd_sizes(parse, text: str, words: str) -> None:
    with pytest.raises(ArgumentTypeError, match=words):
        parse(text)


def test_bits() -> None:
    accepted = [bits for bits in range(65) if _accepts(values.parse_bits, str(bits))]
    assert accepted == [*range(1, 17), 32]
    with pytest.raises(ArgumentTypeError, match=r"Expected a whole number 1 to 16, or 32 \(got"):
        values.parse_bits("4.5")


@pytest.mark.parametrize(
    ("parse", "good", "bad"),
    [
        (values.parse_count, ["1", "500"], ["0", "-1", "2.5", "x"]),
        (values.parse_share, ["0", "0.99"], ["1", "-0.1", "nan", "x"]),
        (values.parse_positive, ["0.01", "3"], ["0", "-1", "inf", "nan", ""]),
        (values.parse_not_negative, ["0", "5e-4"], ["-1e-9", "inf", "nan", ""]),
    ],
)
def test_numbers(parse, good: list[str], bad: list[str]) -> None:
    assert [parse(text) for text in good] == [float(text) for text in good]
    assert [text for text in bad if _accepts(parse, text)] == []


def test_device() -> None:
    assert values.parse_device("cpu") == torch.device("cpu")
    for name in ("gpu", "meta", f"cuda:{torch.cuda.device_count()}"):
        with pytest.raises(UsageError, match="Expected --device cpu"):
            values.parse_device(name)
    expected = "cuda" if torch.cuda.is_available() else "cpu"
    assert values.parse_device(None).type == expected


def _accepts(parse, text: str) -> bool:
    try:
        parse(text)
    except ArgumentTypeError:
        return False
    return True
