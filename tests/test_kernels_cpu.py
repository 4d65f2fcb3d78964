"""The compiled kernels against the oracle, and how they are built, cached and done without."""

from __future__ import annotations

import functools
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import simt
import torch
from test_kernels_reference import DTYPES, GROUP, SAMPLES, WIDTHS, Sample, same_bytes
from torch import Tensor

from gact_graph.kernels import cpu, reference

_ROOT = Path(__file__).resolve().parent.parent
_CAPABILITY = torch.backends.cpu.get_cpu_capability()
_RUNNABLE = {
    "AVX512": ("AVX512", "AVX2", "DEFAULT"),
    "AVX2": ("AVX2", "DEFAULT"),
}.get(_CAPABILITY, ("DEFAULT",))


@pytest.fixture(scope="module", params=[*cpu.VECTOR_FLAGS, "cuda-source"])
def kernels(request: pytest.FixtureRequest) -> Any:
    """A build of the kernels; from the user's cache where an earlier run left it."""
    if request.param == "cuda-source":
        return simt.KERNELS
    if request.param not in _RUNNABLE:
        pytest.skip(f"the processor has {_CAPABILITY}, not {request.param}")
    return cpu.build(cpu.VECTOR_FLAGS[request.param])


@functools.cache
def _expected(sample: Sample, bits: int) -> tuple[Tensor, Tensor, Tensor]:
    """Codes, stats and decoding by the reference, once for all builds."""
    x = sample.tensor()
    codes, stats = reference.pack(x, bits, GROUP, 12345)
    return codes, stats, reference.unpack(codes, stats, list(x.shape), bits, GROUP, x.dtype)


@pytest.mark.parametrize("sample", SAMPLES, ids=str)
def test_same_bytes_as_the_reference(sample: Sample, kernels: Any) -> None:
    x = sample.tensor()
    for bits in WIDTHS:
        codes, stats, y = _expected(sample, bits)
        built_codes, built_stats = kernels.pack(x, bits, GROUP, 12345)
        assert torch.equal(built_codes, codes), bits
        assert torch.equal(built_stats.view(torch.int16), stats.view(torch.int16)), bits
        assert same_bytes(kernels.unpack(codes, stats, x.shape, bits, GROUP, x.dtype), y), bits


@pytest.mark.parametrize("group_size", [64, 192, 320, 1024, 8192])
@pytest.mark.parametrize("seed", [0, -1, 2**63 - 1, -(2**63)])
def test_same_bytes_for_other_groups_and_seeds(group_size: int, seed: int, kernels: Any) -> None:
    for dtype in (torch.float32, torch.float16):
        x = torch.randn(3001, generator=torch.Generator().manual_seed(1)).to(dtype)
        for bits in (1, 3, 8, 11):
            codes, stats = reference.pack(x, bits, group_size, seed)
            built = kernels.pack(x, bits, group_size, seed)
            assert torch.equal(built[0], codes) and torch.equal(built[1], stats)
            y = reference.unpack(codes, stats, [3001], bits, group_size, dtype)
            assert torch.equal(kernels.unpack(codes, stats, [3001], bits, group_size, dtype), y)


@pytest.mark.parametrize("width", [1, 3, 64, 65, 192, 256, 300, 999])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_rows_are_those_of_the_whole(width: int, dtype: torch.dtype, kernels: Any) -> None:
    """Of plain groups, of equal elements, of NaN; the last row ends in a short group."""
    x = torch.randn(5 * width * 20, generator=torch.Generator().manual_seed(width)).to(dtype)
    x[300:600], x[-40:] = 0.1, torch.nan
    rows = torch.tensor([99, 0, 3, 3, 50, 98, 1])
    for bits, group_size in ((1, 64), (4, 256), (7, 192), (11, 1024)):
        codes, stats = reference.pack(x, bits, group_size, 5)
        whole = reference.unpack(codes, stats, [100, width], bits, group_size, dtype)
        for backend in (kernels, reference):
            for wanted in (rows, rows.repeat(2)[::2], rows[:0]):
                found = backend.unpack_rows(
                    codes, stats, wanted, x.numel(), width, bits, group_size, dtype
                )
                assert same_bytes(found, whole[wanted]), (bits, group_size)


def test_rows_that_are_not_there_are_refused(kernels: Any) -> None:
    codes, stats = kernels.pack(torch.randn(300), 2, GROUP, 0)
    if kernels is not simt.KERNELS:  # a GPU ends the process
        for row in (-1, 3):
            with pytest.raises(IndexError, match=rf"Expected rows from 0 to 2 \(got {row}\)"):
                kernels.unpack_rows(
                    codes, stats, torch.tensor([0, row]), 300, 100, 2, GROUP, torch.float32
                )
    rows = torch.tensor([0])
    with pytest.raises(ValueError, match=r"Expected codes of \[7, 2\] .*\(got \[5, 2\]\)"):
        kernels.unpack_rows(codes, stats, rows, 400, 100, 2, GROUP, torch.float32)
    with pytest.raises(ValueError, match=r"Expected rows of 1 element or more \(got 0\)"):
        kernels.unpack_rows(codes, stats, rows, 300, 0, 2, GROUP, torch.float32)


def test_threads_do_not_change_the_bytes(kernels: Any) -> None:
    x = torch.randn(300_000, generator=torch.Generator().manual_seed(2))
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        alone = kernels.pack(x, 3, GROUP, 1)
        torch.set_num_threads(4)
        shared = kernels.pack(x, 3, GROUP, 1)
    finally:
        torch.set_num_threads(threads)
    expected = reference.pack(x, 3, GROUP, 1)
    for packed in (alone, shared):
        assert torch.equal(packed[0], expected[0]) and torch.equal(packed[1], expected[1])


def test_refuses_widths_and_records_that_do_not_fit(kernels: Any) -> None:
    x = torch.randn(300)
    codes, stats = kernels.pack(x, 2, GROUP, 0)
    with pytest.raises(ValueError, match=r"Expected bits from 1 to 16 \(got 17\)"):
        kernels.pack(x, 17, GROUP, 0)
    with pytest.raises(ValueError, match=r"Expected group_size .* multiple of 64 \(got 100\)"):
        kernels.pack(x, 2, 100, 0)
    # A record read past its end would be a silent error, or a crash.
    with pytest.raises(ValueError, match=r"Expected codes of \[7, 2\] .*\(got \[5, 2\]\)"):
        kernels.unpack(codes, stats, [400], 2, GROUP, x.dtype)
    with pytest.raises(ValueError, match=r"Expected codes of \[5, 3\] .*\(got \[5, 2\]\)"):
        kernels.unpack(codes, stats, [300], 3, GROUP, x.dtype)
    with pytest.raises(ValueError, match=r"Expected stats of \[5, 2\] .*\(got \[2, 2\]\)"):
        kernels.unpack(codes, stats, [300], 2, 64, x.dtype)


def test_load_takes_the_flags_of_the_processor() -> None:
    assert cpu.load() is cpu.build(cpu.VECTOR_FLAGS.get(_CAPABILITY, ()))


def test_file_names_change_with_what_is_built(monkeypatch: pytest.MonkeyPatch, tmp_path) -> None:
    names = {cpu._digest([*cpu._FLAGS, *flags]) for flags in cpu.VECTOR_FLAGS.values()}
    assert len(names) == len(cpu.VECTOR_FLAGS)
    plain = cpu._digest(cpu._FLAGS)
    assert cpu._digest(cpu._FLAGS) == plain
    monkeypatch.setenv("CXX", "another")
    assert cpu._digest(cpu._FLAGS) != plain
    monkeypatch.undo()
    for source in (*cpu._HEADERS, *cpu._SOURCES):
        (tmp_path / source).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / source).write_bytes((cpu._CSRC / source).read_bytes())
    monkeypatch.setattr(cpu, "_CSRC", tmp_path)
    assert cpu._digest(cpu._FLAGS) == plain
    (tmp_path / "noise.h").write_text("// changed")
    assert cpu._digest(cpu._FLAGS) != plain


def test_every_source_is_part_of_the_name() -> None:
    """A header left out of the list would let a stale library live on."""
    found = {p.relative_to(cpu._CSRC).as_posix() for p in (cpu._CSRC / "cpu").iterdir()}
    shared = {p.name for p in cpu._CSRC.glob("*.h")}
    assert found | shared == {*cpu._HEADERS, *cpu._SOURCES}


# A session of its own, so that its folder, its compiler and its loaded libraries are its own.
_SESSION = """
import sys, warnings
import torch
from gact_graph import quantizer
from gact_graph.kernels import cpu, reference
cpu._FLAGS = ["-O0", "-std=c++17", "-ffp-contract=off"]  # the building is tested, not the speed
x = torch.linspace(-1, 1, 1000)
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    packed = [quantizer.pack(x, 2, seed=seed) for seed in range(3)]
    decoded = packed[0].unpack()
expected = reference.pack(x, 2, 256, 0)
assert torch.equal(packed[0].codes, expected[0]) and torch.equal(packed[0].stats, expected[1])
assert torch.equal(decoded, reference.unpack(*expected, [1000], 2, 256, x.dtype))
for warning in caught:
    print(warning.category.__name__, warning.message)
print("built" if cpu.load() else "reference", "torch.utils.cpp_extension" in sys.modules)
"""


def _start(cache: Path, **changed: str) -> subprocess.Popen[str]:
    environment = {**os.environ, "TORCH_EXTENSIONS_DIR": str(cache), "OMP_NUM_THREADS": "1"}
    # The plain build runs on every processor.
    environment["ATEN_CPU_CAPABILITY"] = "default"
    return subprocess.Popen(
        [sys.executable, "-c", _SESSION],
        cwd=_ROOT,
        env={**environment, **changed},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def _output(process: subprocess.Popen[str]) -> list[str]:
    out, err = process.communicate(timeout=240)
    assert process.returncode == 0, err
    return out.splitlines()


def test_without_a_compiler_the_reference_serves_and_one_warning_tells(tmp_path: Path) -> None:
    *warned, last = _output(_start(tmp_path, CXX=str(tmp_path / "no-such-compiler")))
    assert last.split()[0] == "reference"
    assert len([line for line in warned if line.startswith("RuntimeWarning")]) == 1
    text = "\n".join(warned)
    assert "could not build its CPU kernels" in text
    assert "Install a C++ compiler (g++ or clang++) and ninja" in text
    assert "python -m gact_graph.info" in text
    assert not list(tmp_path.rglob("*.so"))


def test_two_processes_build_at_once_and_a_third_finds_the_library(tmp_path: Path) -> None:
    both = [_start(tmp_path), _start(tmp_path)]
    assert [_output(process)[-1] for process in both] == ["built True"] * 2
    # The library alone stays: no folder of a build, no lock.
    (library,) = tmp_path.iterdir()
    assert library.suffix == ".so"
    written = library.stat().st_mtime_ns
    assert _output(_start(tmp_path)) == ["built False"]  # cpp_extension was not even imported
    assert library.stat().st_mtime_ns == written


def test_a_build_that_fails_leaves_nothing(tmp_path: Path) -> None:
    _output(_start(tmp_path, CXX="false"))
    assert list(tmp_path.iterdir()) == []
