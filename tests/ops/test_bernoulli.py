"""The noise of dropout: PyTorch's bits, and its generator's state afterwards."""

import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch
from torch import Tensor

from gact_graph.ops import bernoulli, cpu
from gact_graph.ops.bernoulli import dropout_noise
from gact_graph.ops.bitmask import unpack_bits
from gact_graph.ops.reference import bernoulli as reference

_DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)

as_torch = pytest.mark.skipif(
    not bernoulli.draws_as_torch(), reason="this PyTorch has another generator here (MKL on Intel)"
)


def _of_numpy(seed: int, numel: int, p: float) -> Tensor:
    """Draws of NumPy's Mersenne Twister: numbers of 53 bits, of two words each, below p."""
    state = torch.Generator().manual_seed(seed).get_state().numpy()
    twister = np.random.MT19937()
    key = state[24 : 24 + 8 * 624].view(np.uint64).astype(np.uint32)
    twister.state = {"bit_generator": "MT19937", "state": {"key": key, "pos": 624}}
    words = twister.random_raw(2 * numel).astype(np.uint64)
    numbers = (words[::2] << np.uint64(32) | words[1::2]) & np.uint64(2**53 - 1)
    return torch.from_numpy(numbers * 2.0**-53 < p)


@pytest.mark.parametrize("numel", [1, 64, 312, 313, 5_000])
@pytest.mark.parametrize("p", [0.5, 0.1, 1.0])
def test_draws_are_those_of_the_twister(numel: int, p: float) -> None:
    state, words = torch.Generator().manual_seed(4).get_state(), torch.zeros(-(-numel // 64)).long()
    torch.ops.gact_graph.draw_bits(state, words, numel, p)
    drawn = unpack_bits(words, [numel], 0.0, 1.0, torch.bool)
    expected = _of_numpy(4, numel, p)
    draws = torch.empty(numel).bernoulli_(p, generator=torch.Generator().manual_seed(4)).bool()
    assert torch.equal(drawn, draws if cpu.load() is None else expected)
    if numel == 5_000 and p < 1:
        has_twister = torch.equal(draws, expected)
        assert bernoulli.draws_as_torch() == (has_twister and cpu.load() is not None)


@as_torch
def test_threads_draw_different_noise() -> None:
    x, barrier = torch.empty(1 << 18), threading.Barrier(2)

    def draw(_: int) -> list[Tensor]:
        drawn = []
        for _ in range(10):
            barrier.wait()
            noise = dropout_noise(x, 0.5)
            assert noise is not None
            drawn.append(noise.words)
        return drawn

    torch.manual_seed(0)
    with ThreadPoolExecutor(2) as pool:
        first, second = pool.map(draw, range(2))
    state = torch.get_rng_state()
    assert not any(map(torch.equal, first, second))
    torch.manual_seed(0)
    for _ in range(20):
        dropout_noise(x, 0.5)
    assert torch.equal(torch.get_rng_state(), state)


def _torch_noise(x: Tensor, p: float) -> Tensor:
    return torch.empty_like(x).bernoulli_(1 - p).div_(1 - p)


@as_torch  # 312 numbers to a state of the generator; 64 bits to a word
@pytest.mark.parametrize("numel", [1, 63, 64, 65, 311, 312, 313, 10_000])
@pytest.mark.parametrize("before", [0, 1, 2, 623, 624], ids="{} words before".format)
def test_equals_noise_of_torch(numel: int, before: int) -> None:
    for p, dtype in zip((0.5, 0.1, 0.7, 1e-12), _DTYPES, strict=True):
        torch.manual_seed(numel)
        torch.randint(2, (before,), dtype=torch.int32)  # one word of the generator each
        x, state = torch.empty(numel, dtype=dtype), torch.get_rng_state()
        expected, expected_state = _torch_noise(x, p), torch.get_rng_state()
        torch.set_rng_state(state)
        noise = dropout_noise(x, p)
        assert noise is not None
        assert torch.equal(noise.tensor(x.shape, dtype), expected)
        assert torch.equal(torch.get_rng_state(), expected_state)


@as_torch
@pytest.mark.parametrize("p", [0.0, 2.0**-53, 0.25, 1 - 2.0**-53, 1.0])
def test_extreme_probabilities(p: float) -> None:
    drawn = []
    for draw in (torch.ops.gact_graph.draw_bits, reference.draw_bits):
        state, words = torch.Generator().manual_seed(2).get_state(), torch.zeros(16).long()
        draw(state, words, 1_000, p)
        drawn.append((state, words))
    assert all(map(torch.equal, *drawn))


def _noise(x: Tensor, p: float) -> Tensor:
    noise = dropout_noise(x, p)
    assert noise is not None
    return noise.tensor(x.shape, x.dtype)


@as_torch
def test_other_random_functions_continue() -> None:
    x, drawn = torch.empty(1_000), list[list[Tensor]]()
    for noise in (_torch_noise, _noise):
        torch.manual_seed(5)
        first = torch.randn(1)  # leaves a second number in the state
        drawn.append([first, noise(x, 0.4), torch.randn(3), torch.rand(3), torch.randperm(9)])
    assert all(map(torch.equal, *drawn))


def test_no_noise_where_torch_draws_otherwise(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bernoulli, "draws_as_torch", lambda: False)
    state = torch.get_rng_state()
    assert dropout_noise(torch.empty(10), 0.5) is None
    assert torch.equal(torch.get_rng_state(), state)
