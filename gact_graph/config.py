"""What a user may set, and the levels as data."""

from __future__ import annotations

from dataclasses import dataclass

from gact_graph.quantizer import check_bits, check_group_size, check_int


@dataclass(frozen=True)
class Level:
    """What a level does to the contexts that autograd saves.

    Args:
        exact: Masks, indices, gathers and what is never read take their small exact forms.
        quantize: What is left takes ``bits`` an element.
    """

    exact: bool
    quantize: bool


LEVELS = {
    "L0": Level(exact=False, quantize=False),
    "lossless": Level(exact=True, quantize=False),
    "L1": Level(exact=True, quantize=True),
}


@dataclass(frozen=True)
class Config:
    """The settings of one wrapped model; see :func:`gact_graph.wrap` for their meaning."""

    bits: int = 4
    level: str = "L1"
    group_size: int = 256
    seed: int = 0

    def __post_init__(self) -> None:
        check_bits(self.bits)
        check_group_size(self.group_size)
        if not isinstance(self.level, str):
            raise TypeError(f"Expected level to be a str (got {type(self.level).__name__})")
        if self.level not in LEVELS:
            names = ", ".join(repr(name) for name in LEVELS)
            raise ValueError(f"Expected level to be one of {names} (got {self.level!r})")
        check_int("seed", self.seed)

    @property
    def exact(self) -> bool:
        return LEVELS[self.level].exact

    @property
    def quantize(self) -> bool:
        return LEVELS[self.level].quantize and self.bits < 32
