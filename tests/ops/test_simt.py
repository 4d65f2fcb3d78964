"""The emulator of CUDA kernels: each kind of error is found, and a correct kernel passes."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import simt
import torch
from samples import seeded
from torch import Tensor
from unwritten import Watched

from gact_graph.ops.cuda import Kernels, Launcher
from gact_graph.ops.cuda_attention import EdgeKernels
from gact_graph.ops.kernels.nvrtc import Kernel
from gact_graph.ops.kernels.sources import csrc
from gact_graph.ops.reference import weighted_sum as reference

CPU = torch.device("cpu")
N = 500

# Each kernel has the same arguments. `i` is the number of the thread, and of its element.
_SOURCE = """
struct alignas(16) Four {
  float at[4];
};
struct Thread {
  int64_t i = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
  int lane = threadIdx.x % 32;
};
"""
_HEAD = (
    'extern "C" __global__ void %s(const float* x, float* out, int64_t n) {\n  const Thread t;\n'
)
_BODIES = {
    "correct": """
  float sum = 0;
  for (int64_t i = t.i; i < n; i += gridDim.x * blockDim.x) sum += x[i];
  for (int far = 1; far < 32; far *= 2) sum += __shfl_xor_sync(0xFFFFFFFFu, sum, far);
  if (t.lane == 0) out[t.i / 32] = sum;""",
    "correct_vectors": """
  if (t.i < n / 4) {
    reinterpret_cast<Four*>(out)[t.i] = reinterpret_cast<const Four*>(x)[t.i];
  }""",
    "one_value_of_all": "if (x[0] == 1) *out = 7;",
    "read_behind": "if (t.i <= n) out[0] = x[t.i] == -5;",
    "read_before": "if (t.i < n) out[0] = x[t.i - 1] == -5;",
    "write_behind": "if (t.i <= n) out[t.i] = 1;",
    "null": "out[0] = *static_cast<const float*>(nullptr);",
    "misaligned": """
  if (t.i < n / 4 - 1) {
    const Four four = *reinterpret_cast<const Four*>(x + t.i * 4 + 1);
    out[t.i] = four.at[0];
  }""",
    "beyond_an_array": """
  float own[4] = {};
  for (int64_t i = 0; i < n; ++i) own[i] = x[i];
  if (t.i == 0) out[0] = own[n % 4];""",
    "lanes_race": "if (t.i < 32) out[t.lane / 2] = t.lane;",
    "lanes_race_over_a_read": """
  if (t.i < 32) out[t.lane] = x[t.lane];
  if (t.i < 31) out[t.lane + 32] = out[t.lane + 1];""",
    "an_exchange_is_no_barrier": """
  if (t.i < 32) out[t.lane] = x[t.lane];
  __any_sync(0xFFFFFFFFu, true);
  if (t.i < 31) out[t.lane + 32] = out[t.lane + 1];""",
    "warps_race": "if (t.lane == 0) out[0] = t.i;",
    "blocks_race": "if (threadIdx.x == 0) out[0] = t.i;",
    "unwritten": "if (t.i < n) out[t.i] += x[t.i];",
    "half_a_warp_votes": "if (t.lane < 16) __any_sync(0xFFFFFFFFu, true);",
    "different_exchanges": "__shfl_xor_sync(0xFFFFFFFFu, 1, t.lane < 16 ? 1 : 2);",
    "trap": "if (t.i == 40) __trap();",
}

_FAULTS = {
    "read_behind": r"a read within the 2000 bytes of argument 0 \(got bytes 2000 to 2003\)",
    "read_before": r"a read within the 2000 bytes of argument 0 \(got bytes -4 to -1\)",
    "write_behind": r"a write within the 2000 bytes of argument 1 \(got bytes 2000 to 2003\)",
    "null": r"a read within the tensors \(got 4 bytes elsewhere\)",
    "misaligned": r"a multiple of 16 as the address at .*\.cu:\d+ \(got byte \d+ of argument 0\)",
    "beyond_an_array": r"an index within an array at .*\.cu:\d+ \(got 4\)",
    "lanes_race": r"writes of one value to byte \d+ of argument 1 \(got several by several threads",
    "lanes_race_over_a_read": r"byte \d+ of argument 1 for one thread \(got a race with lane",
    "an_exchange_is_no_barrier": r"byte \d+ of argument 1 for one thread \(got a race with lane",
    "warps_race": r"writes of one value to byte 0 of argument 1 \(got several by several threads",
    "blocks_race": r"writes of one value to byte 0 of argument 1 \(got several by several threads",
    "half_a_warp_votes": r"all lanes at one exchange \(got the end of 16\)",
    "different_exchanges": r"all lanes at one exchange \(got several\) by lane \d+ of warp",
    "trap": r"no trap \(got one\) by lane 8 of warp 1 of block 0, seed \d+",
}


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[..., Tensor]]:
    """Run a kernel of this file, on ones by default."""
    path = tmp_path_factory.mktemp("simt") / "kernels.cu"
    kernels = (_HEAD % name + f"  {body}\n}}\n" for name, body in _BODIES.items())
    path.write_text(_SOURCE + "".join(kernels))

    def launch(
        name: str, out: Tensor | None = None, x: Tensor | None = None, **options: Any
    ) -> Tensor:
        x, out = torch.ones(N) if x is None else x, torch.zeros(N) if out is None else out
        simt.launch(Kernel(str(path), name), CPU, 32, x, out, N, **options)
        return out

    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(simt.NAMES, str(path), [*_BODIES])
        yield launch


@pytest.mark.parametrize("name", _FAULTS)
def test_each_fault_is_found(name: str, run: Callable[..., Tensor]) -> None:
    for _ in range(3):
        with pytest.raises(simt.Fault, match=f"^{name}: Expected {_FAULTS[name]}"):
            run(name)


def test_a_correct_kernel_passes(run: Callable[..., Tensor]) -> None:
    for _ in range(3):
        assert run("correct").sum() == N
        assert torch.equal(run("correct_vectors"), torch.ones(N))


def test_writes_of_one_value_are_no_race(run: Callable[..., Tensor]) -> None:
    assert run("one_value_of_all")[0] == 7


def test_a_fault_repeats_with_its_seed_and_moves_with_another(run: Callable[..., Tensor]) -> None:
    def fault(seed: int) -> str:
        with pytest.raises(simt.Fault, match=f"seed {seed}$") as caught:
            run("lanes_race", seed=seed)
        return str(caught.value).partition(", seed")[0]

    assert fault(1) == fault(1)
    assert len({fault(seed) for seed in range(8)}) > 4


def test_overlapping_tensors_are_one(run: Callable[..., Tensor]) -> None:
    """The fault names the first of the arguments."""
    whole = torch.ones(N + 4)
    run("correct_vectors", whole[:N], whole[:N])  # each thread its own bytes
    with pytest.raises(simt.Fault, match=r"of argument 0 for one thread \(got a race with lane"):
        run("correct_vectors", whole[4:], whole[:N])


class _New(Launcher):
    """Kernels named as an operator, with a tensor of their own.

    Args:
        launch: Launches the kernel.
        fill: Fills the new tensor before the kernel reads it.
        use: Uses it after the kernel.
    """

    def __init__(self, launch: Any, fill: Any, use: Any = lambda out: out) -> None:
        super().__init__(launch)
        self._fill, self._use = fill, use

    def pack_bits(self) -> Tensor:
        out = torch.empty(2, N)[1]
        self._fill(out)
        self._launch("unwritten", out)
        return self._use(out)


def test_a_read_before_any_write_is_found(run: Callable[..., Tensor]) -> None:
    for fill in (
        Tensor.zero_,
        lambda out: out.copy_(torch.ones(N)),
        lambda out: out.view(4, -1).fill_(1),
    ):
        Watched(_New(run, fill)).pack_bits()
    message = (
        r"unwritten: Expected a value in byte \d+ of argument 1 \(got a read before any write\)"
    )
    for fill in (lambda out: out, lambda out: out[1:].zero_(), lambda out: torch.zeros_like(out)):
        with pytest.raises(simt.Fault, match=message):
            Watched(_New(run, fill)).pack_bits()


def test_operations_and_results_need_values(run: Callable[..., Tensor]) -> None:
    def skip(name: str, out: Tensor) -> None:
        pass

    def some(out: Tensor) -> Tensor:
        return out[:10].fill_(1)

    for use, what in ((Tensor.sum, "an argument of sum"), (lambda out: out, "the result of")):
        message = rf"a value in each byte of {what}.* \(got none in byte 40\)"
        with pytest.raises(simt.Fault, match=message):
            Watched(_New(skip, some, use)).pack_bits()
    assert Watched(_New(skip, some, lambda out: out[:10].sum())).pack_bits() == 10


class _Planted:
    """The library's kernels, from a copy of ``csrc`` with a fault."""

    def __init__(
        self, patch: pytest.MonkeyPatch, folder: Path, file: str, old: str, new: str
    ) -> None:
        shutil.copytree(csrc(), folder / "csrc")
        self._patch, self._folder, path = patch, folder / "csrc", folder / "csrc" / file
        text = path.read_text()
        assert text.count(old) == 1
        path.write_text(text.replace(old, new))

    def __call__(self, kernel: Kernel, *args: Any) -> None:
        path = str(self._folder / kernel.source)
        self._patch.setitem(simt.NAMES, path, simt.NAMES[kernel.source])
        simt.launch(Kernel(path, kernel.name, kernel.bits), *args)


def _sum(launch: Any) -> None:
    """Sum rows of which one has most edges, and a few have one or none."""
    generator = seeded(0)
    starts = torch.tensor([0, 3, 3, 1900, 2000])
    places = torch.randint(40, (2000,), generator=generator)
    x, weight = torch.randn(40, 6, generator=generator), torch.randn(2000, 1, generator=generator)
    out, expected = torch.empty(4, 6), torch.empty(4, 6)
    kernels: Any = Watched(EdgeKernels(launch))
    kernels.weighted_sum(out, x, places, weight, None, starts)
    reference.weighted_sum(expected, x, places, weight, None, starts)
    # Sums of 1,900 terms in float32, in two orders.
    assert torch.allclose(out, expected, rtol=1e-4, atol=1e-3)


def _mask(launch: Any) -> None:
    Watched(Kernels(launch)).pack_bits(torch.ones(10), 1, 0.0)


def _quantize(launch: Any) -> None:
    Watched(Kernels(launch)).pack(torch.linspace(0, 1, 300), 3, 256, 7)


@pytest.mark.parametrize(
    ("work", "file", "old", "new", "message"),
    [
        pytest.param(
            _sum,
            "cuda/segments.h",
            "          if (writes) {",
            "          if (writes && whole) {",
            r"^add_carries_float32: Expected a value in byte \d+ of argument 6 \(got a read before",
            id="no carries",
        ),
        pytest.param(
            _sum,
            "cuda/segments.h",
            "first = edges.begin(to.row);",
            "first = from.edge;",
            "^add_carries_float32: Expected .*several threads",
            id="carries merged by each warp",
            marks=pytest.mark.long,
        ),
        pytest.param(
            _sum,
            "cuda/segments.h",
            "edge < last; edge += groups",
            "edge <= last; edge += groups",
            r"^sum_float32_2: Expected a read within the 16000 bytes of argument 1 \(got bytes 16",
            id="an edge too many",
            marks=pytest.mark.long,
        ),
        pytest.param(
            _mask,
            "cuda/bitmask.cu",
            "is_first<kEach>() && half < halves",
            "is_first<kEach>()",
            r"^above_float32: Expected a write within the 8 bytes of argument 3 \(got bytes \d+ to",
            id="words behind the last",
        ),
        pytest.param(
            _quantize,
            "cuda/quantize.cu",
            "quad * 4 + plane < width.bits && tile * kTile < count",
            "quad * 4 + plane < width.bits",
            r"^pack_float32: Expected .* argument 4",
            id="planes behind the last",
            marks=pytest.mark.long,
        ),
    ],
)
def test_faults_planted_in_the_kernels_are_found(
    work: Callable[[Any], None],
    file: str,
    old: str,
    new: str,
    message: str,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    work(simt.launch)
    with pytest.raises(simt.Fault, match=message):
        work(_Planted(monkeypatch, tmp_path, file, old, new))
