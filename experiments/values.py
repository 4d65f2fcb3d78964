"""Text from a command line to a value of its kind.

Each function takes one flag's text. What it cannot read raises ``argparse.ArgumentTypeError``,
which argparse puts the flag's name before.
"""

from __future__ import annotations

import argparse
import math

import torch

from experiments.errors import UsageError

FP32_BITS = 32


def parse_seeds(text: str) -> tuple[int, ...]:
    """Read seeds: numbers and ranges with both ends, separated by commas; each counts once.

    >>> parse_seeds("0-2,7")
    (0, 1, 2, 7)
    """
    seeds: list[int] = []
    for part in text.split(","):
        first, dash, last = part.strip().partition("-")
        # isdecimal() alone would let other scripts' digits through.
        if not (first.isascii() and first.isdecimal()) or (
            dash and not (last.isascii() and last.isdecimal())
        ):
            raise argparse.ArgumentTypeError(
                f"Expected seeds as '0-9', '0,3,5' or '4' (got {text!r})"
            )
        low, high = int(first), int(last or first)
        if high < low or high >= 2**32:
            raise argparse.ArgumentTypeError(
                f"Expected seeds from low to high, below 2^32 (got {text!r})"
            )
        seeds.extend(range(low, high + 1))
    return tuple(dict.fromkeys(seeds))


def parse_bits(text: str) -> int:
    """Read a width: 1 to 16, or 32."""
    bits = int(text) if text.isascii() and text.isdecimal() else 0
    if not (1 <= bits <= 16 or bits == FP32_BITS):
        raise argparse.ArgumentTypeError(f"Expected a whole number 1 to 16, or 32 (got {text!r})")
    return bits


def parse_count(text: str) -> int:
    """Read a whole number of at least 1."""
    count = int(text) if text.isascii() and text.isdecimal() else 0
    if count < 1:
        raise argparse.ArgumentTypeError(f"Expected a whole number of at least 1 (got {text!r})")
    return count


def parse_blocks(text: str) -> int | str:
    """Read ``auto``, or a whole number of at least 1."""
    return text if text == "auto" else parse_count(text)


def parse_share(text: str) -> float:
    """Read a number in [0, 1)."""
    share = _number(text)
    if not 0 <= share < 1:
        raise argparse.ArgumentTypeError(f"Expected a number in [0, 1) (got {text!r})")
    return share


def parse_positive(text: str) -> float:
    """Read a finite number above 0."""
    number = _number(text)
    if not 0 < number < math.inf:
        raise argparse.ArgumentTypeError(f"Expected a number above 0 (got {text!r})")
    return number


def parse_not_negative(text: str) -> float:
    """Read a finite number of at least 0."""
    number = _number(text)
    if not 0 <= number < math.inf:
        raise argparse.ArgumentTypeError(f"Expected a number of at least 0 (got {text!r})")
    return number


def _number(text: str) -> float:
    """The number, or NaN, which every comparison refuses."""
    try:
        return float(text)
    except ValueError:
        return math.nan


def parse_device(name: str | None) -> torch.device:
    """Return the device of that name; ``None`` takes CUDA where torch sees it, else the CPU.

    Raises:
        UsageError: If torch does not have it.
    """
    if name is None:
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError:
        device = None
    if device is None or device.type not in ("cpu", "cuda"):
        raise UsageError(f"Expected --device cpu, cuda or cuda:N (got {name!r})")
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise UsageError(
            f"Expected --device cpu, or a CUDA device that torch sees: it sees "
            f"{torch.cuda.device_count()} (got {name!r})"
        )
    return device
