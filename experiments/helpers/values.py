"""Parsing of the values of flags.

Each function takes the text of one flag. Text that it cannot read raises
``argparse.ArgumentTypeError``, to which argparse adds the flag's name; a device that is missing
raises ``UsageError``.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable
from pathlib import Path

import torch

from experiments.helpers.errors import UsageError
from gact_graph.api.report.names import parse_bytes

FP32_BITS = 32
_MOST = 10**12
_MOST_SEEDS = 10_000


def parse_seeds(text: str) -> tuple[int, ...]:
    """Read seeds: numbers and ranges with both ends, separated by commas; each counts once.

    >>> parse_seeds("0-2,7")
    (0, 1, 2, 7)
    """
    seeds: list[int] = []
    for part in text.split(","):
        first, dash, last = part.strip().partition("-")
        if not all(map(_is_whole, (first, last if dash else first))):
            raise _expected("seeds as '0-9', '0,3,5' or '4'", text)
        low, high = _whole(first), _whole(last or first)
        if high < low or high >= 2**32:
            raise _expected("seeds from low to high, below 2^32", text)
        if high - low >= _MOST_SEEDS - len(seeds):
            raise _expected(f"at most {_MOST_SEEDS:,} seeds", text)
        seeds.extend(range(low, high + 1))
    return tuple(dict.fromkeys(seeds))


def parse_bits(text: str) -> int:
    """Read a width: 1 to 16, or 32."""
    bits = _whole(text)
    if not (1 <= bits <= 16 or bits == FP32_BITS):
        raise _expected("a whole number 1 to 16, or 32", text)
    return bits


def parse_count(text: str) -> int:
    """Read a whole number from 1 to 10^12."""
    count = _whole(text)
    if not 1 <= count <= _MOST:
        raise _expected("a whole number from 1 to 10^12", text)
    return count


def parse_draws(text: str) -> int:
    """Read a number of draws, of which :func:`experiments.helpers.noise.moments` needs 3."""
    draws = parse_count(text)
    if draws < 3:
        raise _expected("at least 3 draws", text)
    return draws


def parse_blocks(text: str) -> int | str:
    """Read ``auto``, ``off`` as False, or a whole number from 1 to 10^12."""
    if text == "off":
        return False
    return text if text == "auto" else parse_count(text)


def parse_memory(text: str) -> int:
    """Read an amount of memory such as ``4GB``, in bytes."""
    try:
        return parse_bytes(text)
    except ValueError:
        raise _expected("an amount of memory such as 4GB", text) from None


def _reader(words: str, is_good: Callable[[float], bool]) -> Callable[[str], float]:
    def parse(text: str) -> float:
        try:
            number = float(text)
        except ValueError:
            number = math.nan  # which every comparison refuses
        if not is_good(number):
            raise _expected(words, text)
        return number

    return parse


parse_share = _reader("a number in [0, 1)", lambda number: 0 <= number < 1)
parse_positive = _reader("a number above 0", lambda number: 0 < number < math.inf)
parse_not_negative = _reader("a number of at least 0", lambda number: 0 <= number < math.inf)


def parse_path(text: str) -> Path:
    """Read a path; the empty one, which would be the working directory, is refused."""
    if not text:
        raise argparse.ArgumentTypeError("Expected a path (got ''); '.' is the working directory")
    return Path(text)


def parse_json_file(text: str) -> Path:
    """Read the path of a JSON file: results are found by their suffix."""
    path = parse_path(text)
    if path.suffix != ".json":
        raise argparse.ArgumentTypeError(f"Expected a path that ends in .json (got {text})")
    return path


def parse_device(name: str | None) -> torch.device:
    """Return a device; ``None`` and ``"auto"`` take CUDA where torch sees it, else the CPU.

    Raises:
        UsageError: If torch does not have the device.
    """
    if name in (None, "auto"):
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError:
        device = None
    if device is None or device.type not in ("cpu", "cuda"):
        raise UsageError(f"Expected --device cpu, cuda or cuda:N (got {_short(name)})")
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise UsageError(
            "Expected --device cpu, or a CUDA device that torch sees: it sees "
            f"{torch.cuda.device_count()} (got {_short(name)})"
        )
    return device


def _expected(words: str, text: str) -> argparse.ArgumentTypeError:
    return argparse.ArgumentTypeError(f"Expected {words} (got {_short(text)})")


def _short(text: str) -> str:
    """Return the text in quotes, without its middle if it is long."""
    return repr(text if len(text) <= 60 else f"{text[:40]}...{text[-10:]}")


def _is_whole(text: str) -> bool:
    # isdecimal() alone would let other scripts' digits through.
    return text.isascii() and text.isdecimal()


def _whole(text: str) -> int:
    """Return the number; 0 if it is none, a large one if it has more digits than Python reads."""
    if not _is_whole(text):
        return 0
    return int(text) if len(text) <= 18 else 10**18
