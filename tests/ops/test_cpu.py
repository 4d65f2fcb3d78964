"""The compiled kernels against the oracle, and the flags and digests of a build."""

from __future__ import annotations

import functools
import itertools
import runpy
import shutil
import warnings
from pathlib import Path
from typing import Any

import pytest
import simt
import torch
from cpu_builds import BUILDS, CAPABILITY, build
from grids import grid
from kernel_errors import VALUE_ERROR, of_kernels
from quantizer_samples import DTYPES, GROUP, SAMPLE_CASES, WIDTHS, Sample, normal, same_bytes
from torch import Tensor

from gact_graph.ops import allocator, cpu
from gact_graph.ops.kernels import compiler, prebuilt, sources
from gact_graph.ops.quantize import Widths
from gact_graph.ops.reference import quantize as reference


@pytest.fixture(scope="module", params=[*BUILDS, "cuda-source"])
def kernels(request: pytest.FixtureRequest) -> Any:
    """A build of the kernels; from the user's cache where an earlier run left it."""
    if request.param == "cuda-source":
        return simt.KERNELS
    return build(request.param)


@functools.cache
def _expected(sample: Sample, bits: int) -> tuple[Tensor, Tensor, Tensor]:
    """Codes, stats and decoding by the reference, once for all builds."""
    x = sample.tensor()
    codes, stats = reference.pack(x, bits, GROUP, 12345)
    return codes, stats, reference.unpack(codes, stats, list(x.shape), bits, GROUP, x.dtype)


@pytest.mark.parametrize(
    "widths",
    [(1, 4, 9), pytest.param(WIDTHS, marks=pytest.mark.long)],
    ids=["few widths", "all widths"],
)
@pytest.mark.parametrize("sample", SAMPLE_CASES, ids=str)
def test_same_bytes_as_the_reference(sample: Sample, widths: tuple[int, ...], kernels: Any) -> None:
    x = sample.tensor()
    for bits in widths:
        codes, stats, y = _expected(sample, bits)
        built_codes, built_stats = kernels.pack(x, bits, GROUP, 12345)
        assert torch.equal(built_codes, codes), bits
        assert torch.equal(built_stats.view(torch.int16), stats.view(torch.int16)), bits
        assert same_bytes(kernels.unpack(codes, stats, x.shape, bits, GROUP, x.dtype), y), bits


@pytest.mark.parametrize(
    ("seed", "group_size"), grid([0, -1, 2**63 - 1, -(2**63)], [64, 192, 320, 1024, 8192])
)
def test_same_bytes_for_other_groups_and_seeds(seed: int, group_size: int, kernels: Any) -> None:
    for dtype in (torch.float32, torch.float16):
        x = torch.randn(3001, generator=torch.Generator().manual_seed(1)).to(dtype)
        for bits in (1, 3, 8, 11):
            codes, stats = reference.pack(x, bits, group_size, seed)
            built = kernels.pack(x, bits, group_size, seed)
            assert torch.equal(built[0], codes) and torch.equal(built[1], stats)
            y = reference.unpack(codes, stats, [3001], bits, group_size, dtype)
            assert torch.equal(kernels.unpack(codes, stats, [3001], bits, group_size, dtype), y)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_second_reading_is_that_of_the_reference(dtype: torch.dtype, kernels: Any) -> None:
    x = torch.randn(3001, generator=torch.Generator().manual_seed(1)).to(dtype)
    x[300:600], x[1100], x[-1] = 0.1, torch.nan, torch.inf
    rows = torch.tensor([29, 0, 11, 11])
    for bits, (group_size, seed) in itertools.product(
        (1, 2, 4, 8, 9, 16), ((64, 0), (192, -1), (256, 2**63 - 1), (1024, -(2**63)))
    ):
        codes, stats = reference.pack(x, bits, group_size, seed)
        exact = reference.exact_groups(x, stats, group_size)
        how = bits, group_size, dtype, *exact, seed
        y = reference.unpack(codes, stats, [3001], *how)
        assert not same_bytes(y, reference.unpack(codes, stats, [3001], *how[:-1]))
        assert same_bytes(kernels.unpack(codes, stats, [3001], *how), y), (bits, group_size)
        some = y[:3000].view(30, 100)[rows]
        for backend in (kernels, reference):
            actual = backend.unpack_rows(codes, stats, rows, 3001, 100, *how)
            assert same_bytes(actual, some), (bits, group_size)


@pytest.mark.parametrize(("dtype", "group_size"), grid(DTYPES, [64, 192, 256, 1024]), ids=str)
def test_widths_of_groups_as_the_reference_does_them(
    dtype: torch.dtype, group_size: int, kernels: Any
) -> None:
    """Of plain groups, of equal elements, of NaN; with a short last group and without."""
    for n in (0, 1, 65, 256, 3001, 3072):
        x = normal(n, dtype)
        if n > 3000:
            x[300:600], x[1100], x[-1] = 0.1, torch.nan, torch.inf
        widths = WIDTHS * (n // (16 * group_size) + 1)
        draw = torch.tensor(widths, dtype=torch.uint8)[: -(-n // group_size)].flip(0)
        own = Widths.of(draw, n, group_size)
        codes, stats = reference.pack(x, 4, group_size, -1, draw, own.words)
        actual = kernels.pack(x, 4, group_size, -1, draw, own.words)
        assert torch.equal(actual[0], codes) and same_bytes(actual[1], stats)
        exact = reference.exact_groups(x, stats, group_size)
        width = min(n, 100) or 1
        rows = torch.arange(n // width).flip(0)
        for seed in (None, -1):
            how = 4, group_size, dtype, *exact, seed, draw
            y = reference.unpack(codes, stats, [n], *how)
            assert same_bytes(kernels.unpack(codes, stats, [n], *how), y), (n, seed)
            for backend in (kernels, reference):
                some = backend.unpack_rows(codes, stats, rows, n, width, *how)
                assert same_bytes(some, y[: len(rows) * width].view(-1, width)[rows]), (n, seed)


@pytest.mark.parametrize("bits", [1, 2, 8, 9])
@pytest.mark.parametrize("name", BUILDS)
def test_products_of_both_readings_are_right_on_average(bits: int, name: str) -> None:
    """In steps from the group's least number: E[k k'] = t^2, where E[k k] = t^2 + f (1 - f)."""
    kernels = build(name)
    top, count = 2**bits - 1, 256 * 200
    inside = (torch.arange(count) % 256) > 1
    for fraction in (0.1, 0.5, 0.75):
        x = torch.full((count,), (top - 1) // 2 + fraction)
        x[::256], x[1::256] = 0, top  # so that a step is 1
        codes, stats = kernels.pack(x, bits, 256, 3)
        how = bits, 256, x.dtype, None, None
        actual = (kernels.unpack(codes, stats, [count], *how, seed) for seed in (None, 3))
        first, second = ((y - x)[inside].double() for y in actual)
        variance = fraction * (1 - fraction)
        # Each is a mean over 50,800 numbers below 1, or 2.
        assert first.mean().item() == pytest.approx(0, abs=0.015)
        assert second.mean().item() == pytest.approx(0, abs=0.015)
        assert first.square().mean().item() == pytest.approx(variance, abs=0.015)
        assert second.square().mean().item() == pytest.approx(1 / 3 - variance, abs=0.015)
        assert (first * second).mean().item() == pytest.approx(0, abs=0.015)


@pytest.mark.parametrize(
    ("dtype", "width"), grid(DTYPES, [1, 3, 64, 65, 192, 256, 300, 999]), ids=str
)
def test_rows_are_those_of_the_whole(dtype: torch.dtype, width: int, kernels: Any) -> None:
    """Of plain groups, of equal elements, of NaN; the last row ends in a short group."""
    x = torch.randn(5 * width * 20, generator=torch.Generator().manual_seed(width)).to(dtype)
    x[300:600], x[-40:] = 0.1, torch.nan
    rows = torch.tensor([99, 0, 3, 3, 50, 98, 1])
    for bits, group_size in ((1, 64), (4, 256), (7, 192), (11, 1024)):
        codes, stats = reference.pack(x, bits, group_size, 5)
        whole = reference.unpack(codes, stats, [100, width], bits, group_size, dtype)
        for backend in (kernels, reference):
            for wanted in (rows, rows.repeat(2)[::2], rows[:0]):
                actual = backend.unpack_rows(
                    codes, stats, wanted, x.numel(), width, bits, group_size, dtype
                )
                assert same_bytes(actual, whole[wanted]), (bits, group_size)


def test_rows_that_are_not_there_are_refused(kernels: Any) -> None:
    codes, stats = kernels.pack(torch.randn(300), 2, GROUP, 0)
    trap = r"Expected no trap \(got one\) by lane \d+ of warp 1 "  # the second row
    for row in (-1, 3):
        error, message = IndexError, rf"Expected rows from 0 to 2 \(got {row}\)"
        if kernels is simt.KERNELS:
            error, message = simt.Fault, trap
        with pytest.raises(of_kernels(error), match=message):
            kernels.unpack_rows(
                codes, stats, torch.tensor([0, row]), 300, 100, 2, GROUP, torch.float32
            )
    rows = torch.tensor([0])
    with pytest.raises(VALUE_ERROR, match=r"Expected codes of \[7, 2\].*\(got \[5, 2\]\)"):
        kernels.unpack_rows(codes, stats, rows, 400, 100, 2, GROUP, torch.float32)
    with pytest.raises(VALUE_ERROR, match=r"Expected rows of 1 element or more \(got 0\)"):
        kernels.unpack_rows(codes, stats, rows, 300, 0, 2, GROUP, torch.float32)


@pytest.mark.parametrize("name", BUILDS)
def test_threads_do_not_change_the_bytes(name: str) -> None:
    kernels = build(name)
    x = torch.randn(300_000, generator=torch.Generator().manual_seed(2))
    threads = torch.get_num_threads()
    own = Widths.of((torch.arange(-(-300_000 // GROUP)) % 16 + 1).byte(), 300_000)
    for how in ((), (own.widths, own.words)):
        try:
            torch.set_num_threads(1)
            alone = kernels.pack(x, 3, GROUP, 1, *how)
            torch.set_num_threads(4)
            shared = kernels.pack(x, 3, GROUP, 1, *how)
        finally:
            torch.set_num_threads(threads)
        expected = reference.pack(x, 3, GROUP, 1, *how)
        for packed in (alone, shared):
            assert torch.equal(packed[0], expected[0]) and torch.equal(packed[1], expected[1])


def test_refuses_widths_and_records_that_do_not_fit(kernels: Any) -> None:
    x = torch.randn(300)
    codes, stats = kernels.pack(x, 2, GROUP, 0)
    with pytest.raises(VALUE_ERROR, match=r"Expected bits from 1 to 16 \(got 17\)"):
        kernels.pack(x, 17, GROUP, 0)
    with pytest.raises(VALUE_ERROR, match=r"Expected group_size .* multiple of 64 \(got 100\)"):
        kernels.pack(x, 2, 100, 0)
    # A record read past its end would be a silent error, or a crash.
    with pytest.raises(VALUE_ERROR, match=r"Expected codes of \[7, 2\].*\(got \[5, 2\]\)"):
        kernels.unpack(codes, stats, [400], 2, GROUP, x.dtype)
    with pytest.raises(VALUE_ERROR, match=r"Expected codes of \[5, 3\].*\(got \[5, 2\]\)"):
        kernels.unpack(codes, stats, [300], 3, GROUP, x.dtype)
    with pytest.raises(VALUE_ERROR, match=r"Expected stats of \[5, 2\].*\(got \[2, 2\]\)"):
        kernels.unpack(codes, stats, [300], 2, 64, x.dtype)


@pytest.mark.parametrize("missing", [FileNotFoundError("none"), OSError("no symbol")], ids=repr)
def test_without_a_wheels_library_load_takes_the_flags_of_the_processor(
    missing: OSError, monkeypatch: pytest.MonkeyPatch
) -> None:
    names, taken = list[str](), list[tuple[str, ...]]()

    def absent(name: str) -> None:
        names.append(name)
        raise missing

    monkeypatch.setattr(prebuilt, "load", absent)
    monkeypatch.setattr(cpu, "build", taken.append)
    monkeypatch.setattr(allocator, "load_soon", lambda: None)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        assert cpu.load.__wrapped__() is torch.ops.gact_graph
    variant = CAPABILITY if CAPABILITY in cpu.VECTOR_FLAGS else "DEFAULT"
    assert names == [f"cpu-{variant}"] and taken == [cpu.VECTOR_FLAGS[variant]]
    said = [str(warning.message) for warning in caught]
    assert len(said) == (type(missing) is OSError)
    assert all("built its CPU kernels" in text and "no symbol" in text for text in said)


def test_a_library_belongs_to_its_compiler_and_flags() -> None:
    cpu.load()
    (command, *_) = compiler.commands()
    assert cpu.built(command) is not None
    assert cpu.built([*command, "-DANOTHER"]) is None


@pytest.mark.parametrize("backend", ["cpu", "cuda"])
def test_a_change_of_any_source_or_option_is_another_build(backend: str, tmp_path: Path) -> None:
    shutil.copytree(sources.csrc(), tmp_path / "csrc")
    copy = tmp_path / "gact_graph" / "ops" / "kernels" / "sources.py"
    copy.parent.mkdir(parents=True)
    shutil.copy(sources.__file__, copy)
    digest = runpy.run_path(str(copy))["digest"]  # of the sources beside the copy
    assert digest(backend, ["-O3"]) == sources.digest(backend, ["-O3"])
    marks = {digest(backend, ["-O3"]), digest(backend, ["-O2"])}
    folder = tmp_path / "csrc"
    for count, path in enumerate([*folder.glob("*.h"), *folder.glob(f"{backend}/*")], start=3):
        with path.open("a") as opened:
            opened.write("// changed\n")
        marks.add(digest(backend, ["-O3"]))
        assert len(marks) == count, path
    (folder / backend / "new.h").touch()
    assert digest(backend, ["-O3"]) not in marks
