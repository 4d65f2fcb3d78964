"""The settings of a wrapped model, and the levels."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Literal

from gact_graph.ops.quantize import check_bits, check_group_size, check_int

# Beyond any graph, and small enough that int64 sums with a number of edges do not overflow.
_MOST_EDGES = 2**40

MIN_BYTES = 16 << 20
"""The default of ``min_bytes``. Compressing a small graph makes a step several times as long, for
little memory. The value does not depend on the device's memory: otherwise the same training would
be compressed on one machine and not on another, and its gradients would differ."""


LevelName = Literal["L0", "lossless", "L1", "L2", "CB2"]
BlockSize = int | Literal["auto"]


@dataclass(frozen=True)
class Level:
    """The treatment of the tensors that autograd saves.

    Args:
        exact: Whether masks, indices, recipes and tensors that are never read take exact forms.
        quantize: Whether other tensors take ``bits`` bits an element.
        blocks: Whether edge work runs in blocks by default.
        recompute: Whether message passing layers save their inputs and run again in backward.
        swap: Whether encoded tensors wait for backward in host memory, or for a CPU in files.
    """

    exact: bool
    quantize: bool
    blocks: bool = False
    recompute: bool = False
    swap: bool = False


LEVELS: dict[str, Level] = {
    "L0": Level(exact=False, quantize=False),
    "lossless": Level(exact=True, quantize=False),
    "L1": Level(exact=True, quantize=True, blocks=True),
    "L2": Level(exact=True, quantize=True, blocks=True, swap=True),
    "CB2": Level(exact=True, quantize=True, blocks=True, recompute=True),
}


@dataclass(frozen=True)
class Config:
    """The settings of one wrapped model; see :func:`gact_graph.wrap` for their meaning.

    Plans alone set ``widths``, ``offloaded`` and ``keep_results``: see
    :class:`~gact_graph.api.budget.estimate.Strategy`.
    """

    bits: float = 4
    level: LevelName = "L1"
    adaptive: bool = True
    adapt_interval: int = 500
    pin: Mapping[str, int] = field(default_factory=dict)
    widths: Mapping[str, float] = field(default_factory=dict)
    offloaded: Collection[str] = frozenset()
    group_size: int = 256
    blocks: BlockSize | None = None
    min_bytes: int = MIN_BYTES
    seed: int = 0
    keep_results: bool = False

    def __post_init__(self) -> None:
        if not isinstance(self.adaptive, bool):
            raise TypeError(
                f"Expected adaptive to be True or False (got {type(self.adaptive).__name__})"
            )
        if self.adaptive:
            _check_average(self.bits)
        else:
            check_bits(self.bits)  # type: ignore[arg-type]
        check_int("adapt_interval", self.adapt_interval)
        if self.adapt_interval < 1:
            raise ValueError(f"Expected adapt_interval to be 1 or more (got {self.adapt_interval})")
        for pattern, bits in self.pin.items():
            if not isinstance(pattern, str):
                raise TypeError(f"Expected pin's patterns to be str (got {type(pattern).__name__})")
            check_bits(bits)
        check_group_size(self.group_size)
        if not isinstance(self.level, str):
            raise TypeError(f"Expected level to be a str (got {type(self.level).__name__})")
        if self.level not in LEVELS:
            names = ", ".join(repr(name) for name in LEVELS)
            meant = [name for name in LEVELS if name.lower() == self.level.lower()]
            hint = f"; did you mean {meant[0]!r}?" if meant else ""
            raise ValueError(f"Expected level to be one of {names} (got {self.level!r}){hint}")
        check_int("min_bytes", self.min_bytes)
        if self.min_bytes < 0:
            raise ValueError(f"Expected min_bytes to be 0 or more (got {self.min_bytes})")
        check_int("seed", self.seed)
        check_blocks(self.blocks)

    @property
    def exact(self) -> bool:
        return LEVELS[self.level].exact

    @property
    def quantize(self) -> bool:
        return LEVELS[self.level].quantize and self.bits < 32

    @property
    def recompute(self) -> bool:
        return LEVELS[self.level].recompute

    @property
    def swap(self) -> bool:
        return LEVELS[self.level].swap or bool(self.offloaded)

    def swaps(self, slot: str) -> bool:
        """Return whether the encoded tensor of a slot waits for backward off the device."""
        return LEVELS[self.level].swap or slot in self.offloaded

    @property
    def block_size(self) -> BlockSize | None:
        """The edges of a block, ``"auto"``, or None to run layers as stock PyG."""
        if self.blocks is None:
            return "auto" if LEVELS[self.level].blocks else None
        return "auto" if self.blocks is True else self.blocks or None


def check_blocks(blocks: object) -> None:
    """Raise TypeError or ValueError unless ``blocks`` is a valid setting."""
    if blocks is None or isinstance(blocks, bool) or blocks == "auto":
        return
    if not isinstance(blocks, int):
        got = repr(blocks) if isinstance(blocks, str) else type(blocks).__name__
        raise TypeError(f"Expected blocks to be 'auto', a number of edges or False (got {got})")
    if not 1 <= blocks <= _MOST_EDGES:
        raise ValueError(f"Expected blocks of 1 to 2^40 edges (got {blocks})")


def _check_average(bits: float) -> None:
    if isinstance(bits, bool) or not isinstance(bits, (int, float)):
        raise TypeError(f"Expected bits to be a number (got {type(bits).__name__})")
    if not (1 <= bits <= 16 or bits == 32):
        raise ValueError(
            f"Expected bits to be from 1 to 16, or 32 for no quantization (got {bits})"
        )
