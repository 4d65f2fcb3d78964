"""The operators of the quantizer on a device beside the pure-torch reference, byte for byte.

``python -m experiments.check_kernels --device cuda --out FILE.json``
"""

from __future__ import annotations

import itertools
import math
import sys
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from experiments.check_masks import Cases, mask_cases, same_bytes
from experiments.part import Save, run_part
from gact_graph.kernels import bitmask_reference, reference
from gact_graph.quantizer import DTYPES

WIDTHS = (*range(1, 9), 16)
GROUPS = (64, 256, 1024)
SEEDS = (0, -1, 12345)
SIZES = (0, 1, 63, 65, 257, 1000, 100_003)

LARGE = (1 << 31) + 1000
"""Elements that a 32-bit number cannot count; as bfloat16 4.3 GB."""

_ROWS = (64, 200)
"""Elements of a row, where some rows of a tensor are decoded."""

_OPS = torch.ops.gact_graph


def check(
    device: torch.device,
    save: Save,
    sizes: Sequence[int] = SIZES,
    widths: Sequence[int] = WIDTHS,
    large: int = LARGE,
) -> list[str]:
    """Compare all operators; return a line for each case that differs or raises.

    Saves the number of ``cases`` of each operator and what ``failed``.

    Args:
        device: Where the operators run; the reference runs on the CPU.
        save: Called after each operator.
        sizes: Elements of the inputs.
        widths: Bits.
        large: Elements of the one input that the reference, too, works on on the device.
    """
    found: dict[str, Any] = {"cases": {}, "failed": []}
    jobs: dict[str, Cases] = {
        "pack and unpack": _quantizer(device, sizes, widths),
        "masks": mask_cases(device, sizes),
        "large": iter([(f"large {large}", lambda: _large(device, large))]),
    }
    if device.type == "cuda":
        jobs["graph"] = iter([("CUDA graph of pack and unpack", lambda: _captured(device))])
    for name, cases in jobs.items():
        found["cases"][name] = 0
        for label, same in cases:
            found["cases"][name] += 1
            try:
                problem = None if same() else "differs"
            except Exception as error:  # one case must not hide the others
                problem = f"{type(error).__name__}: {error}".splitlines()[0]
            if problem:
                found["failed"].append(f"{label}: {problem}")
        save(found)
    return found["failed"]


def _samples(sizes: Sequence[int], dtype: torch.dtype) -> Iterator[tuple[str, Tensor]]:
    generator = torch.Generator().manual_seed(0)
    for size in sizes:
        yield f"normal {size}", (10 * torch.randn(size, generator=generator)).to(dtype)
    size = max(sizes)
    plain = torch.randn(size, generator=generator)
    top = min(torch.finfo(dtype).max, torch.finfo(torch.float32).max)
    yield "offset", (0.01 * plain + 100).to(dtype)
    yield "small", (1e-6 * plain).to(dtype)
    yield "constant", torch.full((size,), 0.1).to(dtype)
    yield "zeros of both signs", torch.zeros(size).mul(plain).to(dtype)
    yield "to the maximum", torch.linspace(-1, 1, size, dtype=torch.float64).mul(top).to(dtype)
    for value in (math.nan, math.inf, -math.inf):
        x = plain.to(dtype)
        x[size // 2] = value
        yield f"with {value}", x
    yield "every second", plain.to(dtype)[::2]
    yield "transposed", plain[: size // 3 * 3].view(-1, 3).to(dtype).t()


def _quantizer(device: torch.device, sizes: Sequence[int], widths: Sequence[int]) -> Cases:
    for dtype in DTYPES:
        for name, x in _samples(sizes, dtype):
            # All groups and seeds at one size or another, not each with each.
            for bits, (group, seed) in itertools.product(widths, zip(GROUPS, SEEDS, strict=True)):

                def same(x: Tensor = x, how: tuple[int, int, int] = (bits, group, seed)) -> bool:
                    return _same_quantized(x, device, *how)

                yield f"{name} {dtype}, {bits} bit, groups of {group}, seed {seed}", same


def _same_quantized(x: Tensor, device: torch.device, bits: int, group: int, seed: int) -> bool:
    codes, stats = reference.pack(x, bits, group, seed)
    y = reference.unpack(codes, stats, list(x.shape), bits, group, x.dtype)
    # Strides stay: what is not contiguous is the operator's own matter.
    found_codes, found_stats = _OPS.pack(x.to(device), bits, group, seed)
    found = _OPS.unpack(found_codes, found_stats, x.shape, bits, group, x.dtype)
    return (
        same_bytes(found_codes, codes)
        and same_bytes(found_stats.view(torch.int16), stats.view(torch.int16))
        and same_bytes(found, y)
        and all(_same_rows(x, found_codes, found_stats, y, bits, group, width) for width in _ROWS)
        and found.device == found_codes.device == found_stats.device == x.to(device).device
    )


def _same_rows(
    x: Tensor, codes: Tensor, stats: Tensor, y: Tensor, bits: int, group: int, width: int
) -> bool:
    count = x.numel() // width
    places = torch.arange(count).flip(0)[::3]
    expected = y.flatten()[: count * width].view(count, width)[places]
    given = codes, stats, places.to(codes.device), x.numel(), width, bits, group, x.dtype
    return same_bytes(_OPS.unpack_rows(*given), expected)


def _large(device: torch.device, size: int) -> bool:
    x = torch.randn(1 << 20, generator=torch.Generator().manual_seed(0)).to(torch.bfloat16)
    x = x.to(device).repeat(-(-size // len(x)))[:size]
    codes, stats = _OPS.pack(x, 2, 256, 7)
    expected_codes, expected_stats = reference.pack(x, 2, 256, 7)
    if not (torch.equal(codes, expected_codes) and torch.equal(stats, expected_stats)):
        return False
    y = _OPS.unpack(codes, stats, [size], 2, 256, x.dtype)
    if not torch.equal(y, reference.unpack(codes, stats, [size], 2, 256, x.dtype)):
        return False
    del y, codes, expected_codes
    words = _OPS.pack_bits(x, 1, 0.0)
    return torch.equal(words, bitmask_reference.pack_bits(x, 1, 0.0))


def _captured(device: torch.device) -> bool:
    """Whether a graph that was captured on one input serves another one."""
    inputs = [
        torch.randn(100_003, generator=torch.Generator().manual_seed(seed)) for seed in range(2)
    ]
    x = inputs[0].to(device)

    def round_trip() -> tuple[Tensor, Tensor, Tensor]:
        codes, stats = _OPS.pack(x, 4, 256, 7)
        return codes, stats, _OPS.unpack(codes, stats, x.shape, 4, 256, x.dtype)

    round_trip()  # compiles
    torch.cuda.synchronize(device)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = round_trip()
    x.copy_(inputs[1])
    graph.replay()
    torch.cuda.synchronize(device)
    codes, stats = reference.pack(inputs[1], 4, 256, 7)
    y = reference.unpack(codes, stats, list(x.shape), 4, 256, x.dtype)
    return all(same_bytes(a, b) for a, b in zip(got, (codes, stats, y), strict=True))


def main(argv: list[str] | None = None) -> int:
    """Compare; return the exit code as the main job does."""
    return run_part("check_kernels", __doc__.splitlines()[0], check, argv)


if __name__ == "__main__":
    sys.exit(main())
