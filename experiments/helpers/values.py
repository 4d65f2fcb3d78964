"""Text from a command line to a value of its kind.

Each function takes one flag's text. What it cannot read raises ``argparse.ArgumentTypeError``,
which argparse puts the flag's name before.
"""

from __future__ import annotations

import argparse
import math
from pathlib import Path

import torch

from experiments.helpers.errors import UsageError
from gact_graph.api.report.units import parse_bytes

FP32_BITS = 32
_MOST = 10**9
_MOST_SEEDS = 10_000


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
                f"Expected seeds as '0-9', '0,3,5' or '4' (got {shorten(text)})"
            )
        low, high = _whole(first), _whole(last or first)
        if high < low or high >= 2**32:
            raise argparse.ArgumentTypeError(
                f"Expected seeds from low to high, below 2^32 (got {shorten(text)})"
            )
        if high - low >= _MOST_SEEDS - len(seeds):
            raise argparse.ArgumentTypeError(
                f"Expected at most {_MOST_SEEDS:,} seeds (got {shorten(text)})"
            )
        seeds.extend(range(low, high + 1))
    return tuple(dict.fromkeys(seeds))


def parse_bits(text: str) -> int:
    """Read a width: 1 to 16, or 32."""
    bits = _whole(text)
    if not (1 <= bits <= 16 or bits == FP32_BITS):
        raise argparse.ArgumentTypeError(
            f"Expected a whole number 1 to 16, or 32 (got {shorten(text)})"
        )
    return bits


def parse_count(text: str) -> int:
    """Read a whole number from 1 to 10^9."""
    count = _whole(text)
    if not 1 <= count <= _MOST:
        raise argparse.ArgumentTypeError(
            f"Expected a whole number from 1 to 10^9 (got {shorten(text)})"
        )
    return count


def parse_blocks(text: str) -> int | str:
    """Read ``auto``, ``off`` as False, or a whole number from 1 to 10^9."""
    if text == "off":
        return False
    return text if text == "auto" else parse_count(text)


def parse_memory(text: str) -> int:
    """Read an amount of memory such as ``4GB``, in bytes."""
    try:
        return parse_bytes(text)
    except ValueError:
        raise argparse.ArgumentTypeError(
            f"Expected an amount of memory such as 4GB (got {shorten(text)})"
        ) from None


def parse_share(text: str) -> float:
    """Read a number in [0, 1)."""
    share = _number(text)
    if not 0 <= share < 1:
        raise argparse.ArgumentTypeError(f"Expected a number in [0, 1) (got {shorten(text)})")
    return share


def parse_positive(text: str) -> float:
    """Read a finite number above 0."""
    number = _number(text)
    if not 0 < number < math.inf:
        raise argparse.ArgumentTypeError(f"Expected a number above 0 (got {shorten(text)})")
    return number


def parse_not_negative(text: str) -> float:
    """Read a finite number of at least 0."""
    number = _number(text)
    if not 0 <= number < math.inf:
        raise argparse.ArgumentTypeError(f"Expected a number of at least 0 (got {shorten(text)})")
    return number


def parse_path(text: str) -> Path:
    """Read a path; the empty one, which would be the working directory, is refused."""
    if not text:
        raise argparse.ArgumentTypeError("Expected a path (got ''); '.' is the working directory")
    return Path(text)


def shorten(text: str) -> str:
    """Return the text in quotes, and its middle left out where it is long."""
    return repr(text if len(text) <= 60 else f"{text[:40]}...{text[-10:]}")


def _whole(text: str) -> int:
    """The number, 0 if it is none, and a large one where it has more digits than Python reads."""
    if not (text.isascii() and text.isdecimal()):
        return 0
    return int(text) if len(text) <= 18 else 10**18


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
        raise UsageError(f"Expected --device cpu, cuda or cuda:N (got {shorten(name)})")
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise UsageError(
            f"Expected --device cpu, or a CUDA device that torch sees: it sees "
            f"{torch.cuda.device_count()} (got {shorten(name)})"
        )
    return device
